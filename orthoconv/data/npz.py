"""Images and labels in one .npz file of NumPy. Nothing in it is unpickled."""

__all__ = ["npz_file"]

import math
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy
from numpy.lib import format as npy

from orthoconv.data.arrangement import Arrangement, Labelled, arranged
from orthoconv.data.arrays import channels_first, distinct_names, tensor_of
from orthoconv.data.resizing import resized, size_of
from orthoconv.data.split import DataError, Progress, Split

_PAIRS = (("images", "labels"), ("x", "y"), ("X", "Y"), ("X", "y"), ("data", "labels"))
_TRAIN, _TEST = ("", "train"), ("test", "val")
_LARGEST = 1 << 32  # bytes of all arrays together
_SMALL, _RATIO = 1 << 28, 100  # larger arrays are packed to no less than a hundredth
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def npz_file(
    data_dir: Path | None = None,
    progress: Progress | None = None,
    how: Arrangement = Arrangement(),  # noqa: B008
) -> tuple[Split, Split]:
    """Return the images of a .npz file.

    Its arrays are images and labels, or x and y, with test images beside them in x_test and y_test, or test_images and
    test_labels, if they are apart. Arrays of training images may be called x_train or train_images. Images have the
    shape (n, h, w), (n, c, h, w) or (n, h, w, c), and are bytes, or floats from 0 to 1. Labels are numbers or names. An
    array `classes` may name the classes.

    Arguments:
        data_dir: The file, or a folder with one such file.
        progress: Not used; nothing is downloaded.
        how: The arrangement.
    """
    path = _path(data_dir)
    try:
        with zipfile.ZipFile(path) as archive, warnings.catch_warnings():
            warnings.simplefilter("error")
            arrays = _arrays(archive)
    except Exception as error:  # whatever a file of any bytes makes the parsers raise
        raise DataError(f"{path} cannot be read: {error if str(error) else repr(error)}") from error
    try:
        train, test = _part(arrays, _TRAIN, how), _part(arrays, _TEST, how)
        names = distinct_names(arrays["classes"]) if "classes" in arrays else None
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if train is None:
        raise DataError(f"{path} needs arrays called images and labels, or x and y; it has {_listed(arrays)}")
    return arranged(train, test, how, path, names)


def _path(data_dir: Path | None) -> Path:
    if data_dir is not None and data_dir.is_dir():
        files = sorted(data_dir.glob("*.npz"))
        if len(files) != 1:
            raise DataError(f"{data_dir} has {len(files)} .npz files; name one of them by --data_dir")
        return files[0]
    if data_dir is None or not data_dir.is_file():
        raise DataError(f"a .npz file needs --data_dir, its path, got {data_dir}")
    return data_dir


def _arrays(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Read all arrays, after looking at their sizes."""
    members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if sum(member.file_size for member in members) > _LARGEST:
        raise DataError(f"its arrays have more than {_LARGEST} bytes")
    for member in members:
        if member.file_size > max(_SMALL, _RATIO * member.compress_size):
            raise DataError(f"{member.filename} unpacks {member.compress_size} bytes to {member.file_size}")
    return {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Any:
    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in _HEADERS:
            raise DataError(f"{member.filename} has the version {version} of the format")
        shape, fortran, dtype = _HEADERS[version](file)
        if dtype.kind not in "biufU":
            raise DataError(f"{member.filename} is an array of {dtype}, not of numbers or texts")
        data = file.read(_LARGEST)
    if math.prod(shape) * dtype.itemsize != len(data) or not dtype.itemsize:
        raise DataError(f"{member.filename} has {len(data)} bytes for the shape {shape} of {dtype}")
    return numpy.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


def _part(arrays: dict[str, Any], prefixes: tuple[str, ...], how: Arrangement) -> Labelled | None:
    """Return the images of the first pair of arrays that is there."""
    for prefix in prefixes:
        for pair in _PAIRS:
            keys = (
                [pair] if not prefix else [tuple(f"{prefix}_{k}" for k in pair), tuple(f"{k}_{prefix}" for k in pair)]
            )
            for x, y in keys:
                if x in arrays and y in arrays:
                    return _labelled(x, arrays[x], y, arrays[y], how)
    return None


def _labelled(x: str, images: Any, y: str, labels: Any, how: Arrangement) -> Labelled:
    pixels = channels_first(tensor_of(x, images))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "biuU":
        raise DataError(f"{y} must be numbers or names of shape (n,), got {labels.shape} of {labels.dtype}")
    return Labelled(pixels if how.resize is None else resized(pixels, size_of(how.resize)), labels.tolist())


def _listed(arrays: dict[str, Any]) -> str:
    return ", ".join(sorted(arrays)[:10]) or "none"
