"""Layers that give a value another shape and do not increase distances."""

__all__ = ["Fit", "Spread"]

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.nn.arguments import pair, positive_int
from orthoconv.nn.layer import Guarantee, Layer


class Fit(Layer):
    """Cut images to a size, or pad them by zeros.

    Arguments:
        size: Height and width, an int or a pair.
        centred: Whether both sides lose or gain alike; otherwise rows and columns are cut or added at the end.

    Shape:
        (..., h, w), to (..., *size).

    >>> Fit(3)(torch.ones(1, 1, 1, 1)).flatten()
    tensor([0., 0., 0., 0., 1., 0., 0., 0., 0.])
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def __init__(self, size: int | Sequence[int], centred: bool = True) -> None:
        super().__init__()
        self.target, self.centred = pair("size", size), bool(centred)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (m - n for m, n in zip(self.target, x.shape[-2:], strict=True))
        top, left = (rows // 2, columns // 2) if self.centred else (0, 0)
        return F.pad(x, (left, columns - left, top, rows - top))

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 0.0

    def extra_repr(self) -> str:
        return f"{self.target}, centred={self.centred}"


class Spread(Layer):
    """Repeat a value along its axes of length 1, divided by the root of how often: its norm is exactly 1.

    Arguments:
        shape: Shape of one output, without the batch.

    Shape:
        (b, ...), to (b, *shape).

    >>> Spread((1, 2, 2))(torch.ones(1, 1, 1, 1)).flatten()
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(positive_int("shape", n) for n in shape)

    def forward(self, x: Tensor) -> Tensor:
        if any(m not in (1, n) for n, m in zip(reversed(self.shape), reversed(x.shape[1:]), strict=False)):
            raise ValueError(f"Spread takes a batch that {self.shape} repeats, got shape {tuple(x.shape)}")
        padded = x.reshape(len(x), *[1] * (len(self.shape) + 1 - x.ndim), *x.shape[1:])
        return padded.expand(len(x), *self.shape) * math.sqrt(math.prod(x.shape[1:]) / math.prod(self.shape))

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1 + 2 * torch.finfo(torch.float64).eps

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 4.0

    def extra_repr(self) -> str:
        return f"{self.shape}"
