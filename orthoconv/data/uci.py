"""Handwritten digits of 8 x 8 pixels, which come with the package.

The test set of "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, 1998 (CC BY 4.0): 1,797 images of 13 writers, each pixel a count from 0 to 16.
"""

__all__ = ["digits", "digits32"]

import gzip
import hashlib
from importlib.resources import files

import torch

from orthoconv.data.split import DataError, Split

_SHA256 = "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
_TRAIN = 1297
_CLASSES = tuple("0123456789")


def digits() -> tuple[Split, Split]:
    """Return 1,297 training and 500 test images, always the same. Both splits have images of all writers.

    >>> train, test = digits()
    >>> train.images.shape, test.labels.shape
    (torch.Size([1297, 1, 8, 8]), torch.Size([500]))
    """
    source = files("orthoconv.data").joinpath("digits.bin.gz")
    raw = gzip.decompress(source.read_bytes())
    if hashlib.sha256(raw).hexdigest() != _SHA256:
        raise DataError(f"{source} is damaged: its content does not have the SHA-256 {_SHA256}; install again")
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 65)  # 64 pixels and the label
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    images, labels = rows[:, :64].view(-1, 1, 8, 8) / 16, rows[:, 64].long()
    train, test = (Split(images[part], labels[part], _CLASSES) for part in (slice(_TRAIN), slice(_TRAIN, None)))
    return train, test


def digits32() -> tuple[Split, Split]:
    """Return the digits enlarged to three channels of 32 x 32, to try out what is meant for CIFAR-10.

    >>> digits32()[0].images.shape
    torch.Size([1297, 3, 32, 32])
    """
    train, test = (
        Split(
            split.images.expand(-1, 3, -1, -1).repeat_interleave(4, 2).repeat_interleave(4, 3), split.labels, _CLASSES
        )
        for split in digits()
    )
    return train, test
