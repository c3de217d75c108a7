"""Data sets as tensors in [0, 1], whole and in memory."""

__all__ = ["DATASETS", "DataError", "Split", "augment", "batches", "load"]

from collections.abc import Callable
from pathlib import Path

from orthoconv.data.batching import augment, batches
from orthoconv.data.cifar import cifar10
from orthoconv.data.local import fashion_mnist, image_folder
from orthoconv.data.split import DataError, Progress, Split
from orthoconv.data.stl import stl10
from orthoconv.data.uci import digits, digits32

DATASETS: dict[str, Callable[[Path | None, Progress | None], tuple[Split, Split]]] = {
    "digits": lambda data_dir, progress: digits(),
    "digits32": lambda data_dir, progress: digits32(),
    "cifar10": cifar10,
    "fashion_mnist": fashion_mnist,
    "stl10": stl10,
    "folder": image_folder,
}
"""Data sets that `load` knows: the function of each makes its training and its test split.

>>> "cifar10" in DATASETS
True
"""


def load(name: str, data_dir: Path | None = None, progress: Progress | None = None) -> tuple[Split, Split]:
    """Return the training and the test split of a data set.

    Arguments:
        name: One of `DATASETS`.
        data_dir: Folder of its files; by default their usual place.
        progress: Called during a download with the bytes so far and in all.

    >>> train, test = load("digits")
    """
    if name not in DATASETS:
        raise DataError(f"the data sets are {', '.join(DATASETS)}; got {name!r}")
    return DATASETS[name](data_dir, progress)
