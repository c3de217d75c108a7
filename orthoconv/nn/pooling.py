"""Pooling that uses all the norm it is allowed (Section 5.1)."""

__all__ = ["ScaledAvgPool2d"]

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.nn.base import pair


class ScaledAvgPool2d(nn.Module):
    """Average over blocks of k x k pixels, times k: of norm exactly 1.

    >>> import torch
    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 4, 4)).flatten()
    tensor([2., 2., 2., 2.])
    """

    def __init__(self, kernel_size: int | Sequence[int]) -> None:
        super().__init__()
        self.kernel_size = pair("kernel_size", kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        (h, w), (kh, kw) = x.shape[-2:], self.kernel_size
        if h % kh or w % kw or not h or not w:
            raise ValueError(f"ScaledAvgPool2d takes images whose sides {(kh, kw)} divide, got {(h, w)}")
        return math.sqrt(kh * kw) * F.avg_pool2d(x, self.kernel_size)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}"
