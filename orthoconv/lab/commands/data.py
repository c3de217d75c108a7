"""`orthoconv data`: fetch a data set and print what is in it."""

__all__ = ["data"]

from pathlib import Path

from orthoconv.data import load
from orthoconv.lab.progress import download_bar


def data(data: str, data_dir: Path | None = None) -> None:
    """Load a data set, download it if necessary, and print its sizes and statistics.

    Example: orthoconv data digits

    Args:
        data: Data set: digits, digits32, cifar10, fashion_mnist, stl10 or folder.
        data_dir: Folder of the data set; by default its usual place.
    """
    for part, split in zip(("training", "test"), load(data, data_dir, download_bar()), strict=True):
        n, channels, h, w = split.images.shape
        print(f"{part}: {n} images, {channels} x {h} x {w}, {int(split.labels.max()) + 1} classes")
        mean, std = split.images.mean((0, 2, 3)).tolist(), split.images.std((0, 2, 3)).tolist()
        print(f"  mean {' '.join(f'{v:.4f}' for v in mean)}, standard deviation {' '.join(f'{v:.4f}' for v in std)}")
        print(f"  images of each class: {split.labels.bincount().tolist()}")
