"""Data sets as tensors in [0, 1], whole and in memory."""

__all__ = ["DATASETS", "OWN", "DataError", "Split", "as_split", "augment", "batches", "load", "locate"]

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from orthoconv.data.arrangement import Arrangement
from orthoconv.data.arrays import as_split
from orthoconv.data.batching import augment, batches
from orthoconv.data.cifar import cifar10
from orthoconv.data.folder import image_folder
from orthoconv.data.idx import fashion_mnist, idx_set
from orthoconv.data.npz import npz_file
from orthoconv.data.resizing import Size, resized_split, size_of
from orthoconv.data.split import DataError, Progress, Split
from orthoconv.data.stl import stl10
from orthoconv.data.uci import digits, digits32

DATASETS: dict[str, Callable[..., tuple[Split, Split]]] = {
    "digits": lambda data_dir, progress: digits(),
    "digits32": lambda data_dir, progress: digits32(),
    "cifar10": cifar10,
    "fashion_mnist": fashion_mnist,
    "stl10": stl10,
    "folder": image_folder,
    "npz": npz_file,
    "idx": idx_set,
}
"""Data sets that `load` knows: the function of each makes its training and its test split.

>>> "cifar10" in DATASETS
True
"""
OWN = ("folder", "npz", "idx")
"""The names that stand for images of one's own, which take an `Arrangement`.

>>> "folder" in OWN
True
"""


def load(
    name: str,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    *,
    resize: Size | None = None,
    split: float | None = None,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> tuple[Split, Split]:
    """Return the training and the test split of a data set.

    Arguments:
        name: One of `DATASETS`, or the path of images of one's own.
        data_dir: Folder of its files; by default their usual place. For "npz" it may be the file itself.
        progress: Called during a download with the bytes so far and in all.
        resize: Size to give the images: one number of pixels, or height and width. They are scaled, and cut off evenly
            where they are too long.
        split: Share of one's own images that are test images, if they are not divided already; 0.2 by default.
        seed: Seed of that division and of the order of one's own images. Any first n of them have all classes about as
            often as the whole.
        classes: Names of the classes that one's own images may have, in their order; by default those that the training
            images have.

    >>> train, test = load("digits")
    >>> train.classes
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    name, data_dir = locate(name, data_dir)
    if name not in DATASETS:
        raise DataError(f"the data sets are {', '.join(DATASETS)}; got {name!r}")
    if name in OWN:
        return DATASETS[name](data_dir, progress, Arrangement(resize, split, seed, classes))
    if split is not None:
        raise DataError(f"{name} has test images of its own; split is for {', '.join(OWN)}, got {split!r}")
    splits = DATASETS[name](data_dir, progress)
    if resize is None:
        return splits
    train, test = (resized_split(one, size_of(resize)) for one in splits)
    return train, test


def locate(name: str, data_dir: Path | None = None) -> tuple[str, Path | None]:
    """Return the name of a data set and its folder, where `name` may also be the path of images of one's own.

    Such a path takes the place of `data_dir`.

    Arguments:
        name: Name of a data set, or the path of images of one's own.
        data_dir: Folder of the data set; by default its usual place.

    >>> locate("digits")
    ('digits', None)
    """
    if name in DATASETS or not name or not os.path.exists(name):
        return name, data_dir
    path = Path(name)
    if path.is_file() or any(path.glob("*.npz")):
        return "npz", path
    return ("idx" if any(path.glob("*idx?-ubyte*")) else "folder"), path
