"""Images in files: in a folder for each class, or in one folder with a file of labels."""

__all__ = ["image_folder"]

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from orthoconv.data.arrangement import Arrangement, Labelled, arranged
from orthoconv.data.decoding import SUFFIXES, read_picture
from orthoconv.data.labels import LABEL_FILES, labelled_files
from orthoconv.data.resizing import resized, size_of
from orthoconv.data.split import DataError, Progress, Split

_TESTS = ("test", "val", "valid", "validation")
Files = list[tuple[Path, str]]  # of images, and the name of the class of each


def image_folder(
    data_dir: Path | None = None,
    progress: Progress | None = None,
    how: Arrangement = Arrangement(),  # noqa: B008
) -> tuple[Split, Split]:
    """Return the images of a folder.

    Either it has a folder for each class, or it has the images themselves and labels.csv or labels.json. If it has
    folders train and test (or val), each of them is such a folder; otherwise test images are taken from all. Classes
    are in alphabetical order. Without a size to give them, all images must have the same one.

    Arguments:
        data_dir: The folder.
        progress: Not used; nothing is downloaded.
        how: The arrangement.
    """
    if data_dir is None or not data_dir.is_dir():
        raise DataError(f"a folder of images needs --data_dir, got {data_dir}")
    tests = [data_dir / name for name in _TESTS if (data_dir / name).is_dir()]
    if (data_dir / "train").is_dir() and tests:
        parts, classes = [data_dir / "train", tests[0]], _classes(data_dir / "train")
    else:
        parts, classes = [data_dir], _classes(data_dir)
    files = [_files(part) for part in parts]
    if known := how.classes or classes:
        for folder, part in zip(parts, files, strict=True):
            _require_known(folder, part, known)
    images = _images([path for part in files for path, _ in part], how)
    train, *test = (
        Labelled(pixels, [name for _, name in part])
        for pixels, part in zip(images.split([len(part) for part in files]), files, strict=True)
    )
    return arranged(train, test[0] if test else None, how, data_dir, classes)


def _classes(folder: Path) -> list[str] | None:
    """Return the names of the folders of classes, or nothing if there is a file of labels."""
    if any((folder / name).is_file() for name in LABEL_FILES):
        return None
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folder: Path) -> Files:
    """Return the images of a folder, with the class of each."""
    for name in LABEL_FILES:
        if (folder / name).is_file():
            return labelled_files(folder, name, SUFFIXES)
    files = [
        (path, name) for name in _classes(folder) or () for path in sorted((folder / name).glob("*")) if _is_image(path)
    ]
    if not files:
        flat = any(_is_image(path) for path in folder.iterdir())
        raise DataError(
            f"{folder} has no images ({', '.join(SUFFIXES)}) in folders of classes"
            + (f"; for those without, it needs {' or '.join(LABEL_FILES)}" if flat else "")
        )
    return files


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _require_known(folder: Path, files: Files, classes: Sequence[str]) -> None:
    if unknown := sorted({name for _, name in files} - set(classes)):
        raise DataError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")


def _images(paths: list[Path], how: Arrangement) -> Tensor:
    """Read images of one size. Grey ones get the channels of coloured ones beside them."""
    size = None if how.resize is None else size_of(how.resize)
    images: list[Tensor] = []
    for path in paths:
        image = read_picture(path)
        image = image if size is None else resized(image[None], size)[0]
        if images and image.shape[1:] != images[0].shape[1:]:
            (h, w), (first_h, first_w) = image.shape[1:], images[0].shape[1:]
            raise DataError(
                f"{path} differs in size from {paths[0]}: {w} x {h} pixels and {first_w} x {first_h}; "
                "--resize 32, for example, gives all images one size"
            )
        images.append(image)
    channels = max(len(image) for image in images)
    return torch.stack([image.expand(channels, -1, -1) for image in images])
