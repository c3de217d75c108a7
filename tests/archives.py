"""CIFAR-10 in small: sixty records, packed as its archive and as its npm package."""

import io
import json
import tarfile

import torch
from PIL import Image

from orthoconv.data import cifar as cifar10


def small_records() -> torch.Tensor:
    """Sixty in the format of CIFAR-10, six batches of ten."""
    return torch.randint(256, (60, 3073), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)) % 10


def batch(k: int) -> bytes:
    return small_records()[10 * k : 10 * k + 10].numpy().tobytes()


def tar_of(members: dict[str, bytes], links: dict[str, tuple[bytes, str]] | None = None) -> bytes:
    """A packed archive of files, and of links: of their type and target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, (kind, target) in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return buffer.getvalue()


def package() -> dict[str, bytes]:
    """Files of the npm package, of ten images each."""
    records, files = small_records(), {}
    for k, name in enumerate(cifar10._BATCHES):
        pixels = records[10 * k : 10 * k + 10, 1:].view(10, 3, 1024).permute(0, 2, 1).contiguous()
        buffer = io.BytesIO()
        Image.frombytes("RGB", (1024, 10), pixels.numpy().tobytes()).save(buffer, "png")
        files[f"package/{name}.png"] = buffer.getvalue()
    labels = records[:, 0].tolist()
    files["package/train_lables.json"] = json.dumps(labels[:50]).encode()
    files["package/test_lables.json"] = json.dumps(labels[50:]).encode()
    return files
