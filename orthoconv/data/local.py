"""Data sets from local files: Fashion-MNIST in IDX files, and folders of images by class."""

__all__ = ["fashion_mnist", "image_folder"]

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from orthoconv.data.split import DataError, Progress, Split, split_of

_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def fashion_mnist(data_dir: Path | None = None, progress: Progress | None = None) -> tuple[Split, Split]:
    """Return Fashion-MNIST (Xiao et al., 2017): 60,000 and 10,000 images of 28 x 28, from IDX files, packed or not.

    Arguments:
        data_dir: Folder of the four files; by default that of Debian's package dataset-fashion-mnist.
        progress: Not used; nothing is downloaded.
    """
    folder = data_dir or _DEBIAN
    train, test = (
        split_of(_idx(folder, f"{part}-images-idx3-ubyte", 3)[:, None], _idx(folder, f"{part}-labels-idx1-ubyte", 1))
        for part in ("train", "t10k")
    )
    for split, n in ((train, 60_000), (test, 10_000)):
        if (len(split.images), len(split.labels)) != (n, n):
            raise DataError(f"{folder} has {len(split.images)} images with {len(split.labels)} labels, not {n}")
    return train, test


def _idx(folder: Path, name: str, axes: int) -> Tensor:
    """Read an IDX file of unsigned bytes with so many axes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise DataError(f"{folder / name} does not exist, nor with .gz; Debian's dataset-fashion-mnist has it")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        zero, kind, rank = struct.unpack(">HBB", data[:4])
        if zero or kind != 8 or rank != axes:
            raise ValueError(f"it does not begin as an IDX file of unsigned bytes with {axes} axes")
        shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
        return torch.frombuffer(bytearray(data[4 + 4 * rank :]), dtype=torch.uint8).view(shape)
    except (ValueError, RuntimeError, OSError, EOFError, struct.error, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def image_folder(data_dir: Path | None = None, progress: Progress | None = None) -> tuple[Split, Split]:
    """Return images of one size from the folders train/CLASS and test/CLASS; classes are in alphabetical order."""
    if data_dir is None or not (data_dir / "train").is_dir() or not (data_dir / "test").is_dir():
        raise DataError(f"a folder of images needs --data_dir with train/CLASS and test/CLASS in it, got {data_dir}")
    classes = sorted(p.name for p in (data_dir / "train").iterdir() if p.is_dir())
    return _folder(data_dir / "train", classes), _folder(data_dir / "test", classes)


def _folder(folder: Path, classes: list[str]) -> Split:
    if unknown := sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in classes):
        raise DataError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
    paths = [
        (p, k) for k, c in enumerate(classes) for p in sorted((folder / c).glob("*")) if p.suffix.lower() in _SUFFIXES
    ]
    if not paths:
        raise DataError(f"{folder} has no images ({', '.join(sorted(_SUFFIXES))}) in folders of classes")
    images = [_image(path) for path, _ in paths]
    if odd := [p for (p, _), image in zip(paths, images, strict=True) if image.shape != images[0].shape]:
        raise DataError(f"{odd[0]} differs in size from {paths[0][0]}, which is {tuple(images[0].shape[1:])}")
    return split_of(torch.stack(images), torch.tensor([k for _, k in paths]))


def _image(path: Path) -> Tensor:
    try:
        from PIL import Image

        with Image.open(path) as image:
            if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
                grey = torch.frombuffer(bytearray(image.convert("I").tobytes()), dtype=torch.int32)
                return (grey.view(1, image.height, image.width) / 257).round().to(torch.uint8)
            mode = "L" if image.mode in ("L", "1") else "RGB"
            raw = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
            return raw.view(image.height, image.width, -1).permute(2, 0, 1)
    except ModuleNotFoundError as error:
        raise DataError('reading images needs Pillow: pip install "orthoconv[lab]"') from error
    except Exception as error:
        raise DataError(f"{path} cannot be read as an image: {error}") from error
