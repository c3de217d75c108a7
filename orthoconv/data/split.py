"""A data set in memory, and the error of one that cannot be read."""

__all__ = ["DataError", "Progress", "Split", "split_of"]

from collections.abc import Callable
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


class Split(NamedTuple):
    """Images (n, c, h, w) in [0, 1], float32, and their labels (n,), int64.

    Attributes:
        images: The images.
        labels: The class of each.

    >>> split = Split(torch.rand(5, 1, 8, 8), torch.arange(5))
    >>> split.first(2).labels
    tensor([0, 1])
    """

    images: Tensor
    labels: Tensor

    def first(self, n: int) -> "Split":
        """Return the first n images, or all of them for 0."""
        if n < 0:
            raise ValueError(f"the number of images must be at least 0, got {n}")
        return Split(self.images[:n], self.labels[:n]) if n else self


def split_of(pixels: Tensor, labels: Tensor) -> Split:
    """Make a `Split` of integers: pixels (n, c, h, w) from 0 to 255, and labels."""
    return Split(pixels.to(torch.float32).div_(255), labels.long())
