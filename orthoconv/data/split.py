"""What every data set is made of."""

__all__ = ["DataError", "Progress", "Split", "split_of"]

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Progress = Callable[[int, int], None]  # bytes so far, bytes in all


class DataError(Exception):
    """Data that is missing, damaged or not what it should be; the message says which and where."""


class Split(NamedTuple):
    """Images (n, c, h, w) in [0, 1], float32, and their labels (n,), int64."""

    images: Tensor
    labels: Tensor

    def first(self, n: int) -> "Split":
        """The first n images, or all of them for 0."""
        return Split(self.images[:n], self.labels[:n]) if n else self


def split_of(pixels: Tensor, labels: Tensor) -> Split:
    """`Split` of pixels (n, c, h, w) from 0 to 255 and labels, both of integers."""
    return Split(pixels.to(torch.float32).div_(255), labels.long())
