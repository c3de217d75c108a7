"""`orthoconv data`: fetch a data set and print what is in it."""

__all__ = ["data"]

from pathlib import Path

from orthoconv.data import load
from orthoconv.lab.progress import download_bar

_MOST_NAMES = 20


def data(
    data: str,
    data_dir: Path | None = None,
    resize: int | tuple[int, int] | None = None,
    split: float | None = None,
    data_seed: int = 0,
) -> None:
    """Load a data set, download it if necessary, and print its sizes, classes and statistics.

    Example: orthoconv data digits

    Args:
        data: Data set: digits, digits32, cifar10, fashion_mnist, stl10; or folder, npz or idx for images of one's own,
            or their path.
        data_dir: Folder of the data set; by default its usual place.
        resize: Size to give the images, such as 32 or [24,32] for height and width; by default they keep theirs.
        split: Share of one's own images that are test images, if they are not in folders train and test; by default
            0.2.
        data_seed: Seed of that division, and of the order of one's own images.
    """
    splits = load(data, data_dir, download_bar(), resize=resize, split=split, seed=data_seed)
    names = splits[0].classes
    for part, one in zip(("training", "test"), splits, strict=True):
        n, channels, h, w = one.images.shape
        classes = int(one.labels.max()) + 1 if names is None else len(names)
        print(f"{part}: {n} images, {channels} x {h} x {w}, {classes} classes")
        mean, std = one.images.mean((0, 2, 3)).tolist(), one.images.std((0, 2, 3)).tolist()
        print(f"  mean {' '.join(f'{v:.4f}' for v in mean)}, standard deviation {' '.join(f'{v:.4f}' for v in std)}")
        print(f"  images of each class: {one.labels.bincount(minlength=classes).tolist()}")
    if names is not None:
        more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
        print(f"classes: {', '.join(names[:_MOST_NAMES])}{more}")
