"""A data set in memory, and the error of one that cannot be read."""

__all__ = ["DataError", "Progress", "Split", "split_of"]

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


class DataError(Exception):
    """A data set is missing, damaged or not the expected one; the message says which and where.

    >>> from orthoconv.data import load
    >>> load("mnist")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    orthoconv.data.split.DataError: ...; got 'mnist'
    """


class _Pair(NamedTuple):
    images: Tensor
    labels: Tensor


class Split(_Pair):
    """Images (n, c, h, w) in [0, 1], float32, and their labels (n,), int64.

    It is a pair: `images, labels = split`. Beside that it knows the names of its classes, if they are given.

    Arguments:
        images: Images.
        labels: The class of each of them, a number from 0.
        classes: Name of each class.

    >>> images, labels = split = Split(torch.rand(4, 1, 8, 8), torch.arange(4) % 2, ("cat", "dog"))
    >>> len(split.first(3).labels), split.first(3).classes
    (3, ('cat', 'dog'))
    """

    classes: tuple[str, ...] | None = None

    def __new__(cls, images: Tensor, labels: Tensor, classes: Sequence[str] | None = None) -> "Split":
        """Make a pair, and keep the names."""
        split = super().__new__(cls, images, labels)
        split.classes = None if classes is None else tuple(classes)
        return split

    def first(self, n: int) -> "Split":
        """Return the first n images, or all of them for 0."""
        if n < 0:
            raise ValueError(f"the number of images must be at least 0, got {n}")
        return Split(self.images[:n], self.labels[:n], self.classes) if n else self

    @property
    def fingerprint(self) -> str:
        """Digest of the images and labels: it tells whether a folder still holds the same ones."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self:
            digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()


def split_of(pixels: Tensor, labels: Tensor, classes: Sequence[str] | None = None) -> Split:
    """Make a `Split` of integers: pixels (n, c, h, w) from 0 to 255, and labels.

    Names of classes that are fewer than the labels are left out.
    """
    fits = classes is not None and bool((labels < len(classes)).all())
    return Split(pixels.to(torch.float32).div_(255), labels.long(), classes if fits else None)
