"""Pooling that uses all the norm it is allowed (Section 5.1)."""

__all__ = ["ScaledAvgPool2d"]

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from orthoconv.nn.arguments import pair
from orthoconv.nn.layer import Guarantee, Layer


class ScaledAvgPool2d(Layer):
    """Average over blocks of k x k pixels, times k: its norm is exactly 1.

    Arguments:
        kernel_size: Side k of a block, an int or a pair; it divides the image.

    Shape:
        (..., h, w), to (..., h / k, w / k).

    >>> import torch
    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 4, 4)).flatten()
    tensor([2., 2., 2., 2.])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(self, kernel_size: int | Sequence[int]) -> None:
        super().__init__()
        self.kernel_size = pair("kernel_size", kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        (h, w), (kh, kw) = x.shape[-2:], self.kernel_size
        if h % kh or w % kw or not h or not w:
            raise ValueError(f"ScaledAvgPool2d takes images whose sides {(kh, kw)} divide, got {(h, w)}")
        return math.sqrt(kh * kw) * F.avg_pool2d(x, self.kernel_size)

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        k = math.prod(self.kernel_size)
        return float((k + 3) * k)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}"
