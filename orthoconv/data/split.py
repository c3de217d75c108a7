"""What every data set is made of."""

__all__ = ["Split"]

from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """Images (n, c, h, w) in [0, 1], float32, and their labels (n,), int64."""

    images: Tensor
    labels: Tensor
