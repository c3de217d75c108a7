"""Images and labels in IDX files, the format of MNIST: Fashion-MNIST, and any set like it."""

__all__ = ["fashion_mnist", "idx_set"]

import gzip
import math
import re
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from orthoconv.data.arrangement import Arrangement, Labelled, arranged
from orthoconv.data.arrays import channels_first
from orthoconv.data.resizing import resized, size_of
from orthoconv.data.split import DataError, Progress, Split, split_of

_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_LARGEST = 1 << 31  # bytes of a file, unpacked; EMNIST has 638 MB
_IMAGES = re.compile(r"(.*)images?([.-]idx[34]-ubyte)(\.gz)?")
_TEST = ("test", "t10k", "val")


def fashion_mnist(data_dir: Path | None = None, progress: Progress | None = None) -> tuple[Split, Split]:
    """Return Fashion-MNIST (Xiao et al., 2017): 60,000 and 10,000 images of 28 x 28, from IDX files, packed or not.

    Arguments:
        data_dir: Folder of the four files; by default that of Debian's package dataset-fashion-mnist.
        progress: Not used; nothing is downloaded.
    """
    folder = data_dir or _DEBIAN
    names = [[f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"] for part in ("train", "t10k")]
    train, test = (
        split_of(_read(_file(folder, x), 3)[:, None], _read(_file(folder, y), 1), _FASHION) for x, y in names
    )
    for split, n in ((train, 60_000), (test, 10_000)):
        if (len(split.images), len(split.labels)) != (n, n):
            raise DataError(f"{folder} has {len(split.images)} images with {len(split.labels)} labels, not {n}")
    return train, test


def idx_set(
    data_dir: Path | None = None,
    progress: Progress | None = None,
    how: Arrangement = Arrangement(),  # noqa: B008
) -> tuple[Split, Split]:
    """Return the images of a folder with IDX files, such as MNIST, KMNIST or one part of EMNIST.

    Images are in ...images-idx3-ubyte, or idx4 if they have channels, their labels in ...labels-idx1-ubyte, packed by
    gzip or not. With two such pairs, test images are in the one whose name has test, t10k or val in it.

    Arguments:
        data_dir: The folder.
        progress: Not used; nothing is downloaded.
        how: The arrangement.
    """
    if data_dir is None or not data_dir.is_dir():
        raise DataError(f"IDX files need --data_dir, the folder that has them, got {data_dir}")
    pairs = {found.group(1): found for p in sorted(data_dir.iterdir()) if (found := _IMAGES.fullmatch(p.name))}
    tests = [name for name in pairs if any(word in name.lower() for word in _TEST)]
    trains = [name for name in pairs if name not in tests]
    if len(trains) != 1 or len(tests) > 1:
        listed = ", ".join(found.group(0) for found in pairs.values()) or "none"
        raise DataError(
            f"{data_dir} needs one file ...images-idx3-ubyte, or one beside that of test images, got {listed}"
        )
    train, *test = (_pair(data_dir, pairs[name], how) for name in (*trains, *tests))
    return arranged(train, test[0] if test else None, how, data_dir)


def _pair(folder: Path, name: re.Match[str], how: Arrangement) -> Labelled:
    path = folder / name.group(0)
    pixels = channels_first(_read(path, 4 if "idx4" in path.name else 3))
    labels = re.sub("idx[34]", "idx1", f"{name.group(1)}label{'s' if 'images' in path.name else ''}{name.group(2)}")
    numbers = _read(_file(folder, labels), 1)
    return Labelled(pixels if how.resize is None else resized(pixels, size_of(how.resize)), numbers.tolist())


def _file(folder: Path, name: str) -> Path:
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        hint = "; Debian's dataset-fashion-mnist has it" if folder == _DEBIAN else ""
        raise DataError(f"{folder / name} does not exist, nor with .gz{hint}")
    return path


def _read(path: Path, axes: int) -> Tensor:
    """Read an IDX file of unsigned bytes with so many axes."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            data = file.read(_LARGEST + 1)
        zero, kind, rank = struct.unpack(">HBB", data[:4])
        if zero or kind != 8 or rank != axes:
            raise ValueError(f"it does not begin as an IDX file of unsigned bytes with {axes} axes")
        shape = struct.unpack(f">{rank}I", data[4 : 4 + 4 * rank])
        if math.prod(shape) != len(data) - 4 - 4 * rank:
            raise ValueError(f"it has {len(data) - 4 - 4 * rank} bytes for an array of {' x '.join(map(str, shape))}")
        return torch.frombuffer(bytearray(data[4 + 4 * rank :]), dtype=torch.uint8).view(shape)
    except (ValueError, RuntimeError, OSError, EOFError, MemoryError, struct.error, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error
