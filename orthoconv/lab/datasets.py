"""`orthoconv data`: fetch a data set and say what is in it."""

__all__ = ["data"]

from pathlib import Path

from orthoconv.data import load
from orthoconv.lab.progress import download_bar


def data(name: str = "digits", data_dir: Path | None = None) -> None:
    """Load a data set, fetching it if need be, and print its sizes and statistics.

    Args:
        name: digits, digits32, cifar10, fashion_mnist, stl10 or folder.
        data_dir: Where it is; by default where it usually is.
    """
    for part, split in zip(("training", "test"), load(name, data_dir, download_bar()), strict=True):
        n, channels, h, w = split.images.shape
        print(f"{part}: {n} images, {channels} x {h} x {w}, {int(split.labels.max()) + 1} classes")
        mean, std = split.images.mean((0, 2, 3)).tolist(), split.images.std((0, 2, 3)).tolist()
        print(f"  mean {' '.join(f'{v:.4f}' for v in mean)}, deviation {' '.join(f'{v:.4f}' for v in std)}")
        print(f"  images of each class: {split.labels.bincount().tolist()}")
