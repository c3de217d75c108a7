"""Learned additions and multiplications that do not increase distances: what is left of a normalisation."""

__all__ = ["Gain", "Shift"]

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import positive_int
from orthoconv.nn.layer import Guarantee, Layer


class Shift(Layer):
    """Add learned numbers, which leaves distances as they are; at first 0.

    Arguments:
        shape: Shape of the numbers, which are repeated along its axes of length 1 and along the axes before:
            (c, 1, 1) for a number for each channel of an image.

    Shape:
        (b, ...), to the same.

    >>> Shift((2, 1, 1))(torch.ones(1, 2, 1, 1)).flatten()
    tensor([1., 1.], grad_fn=<ViewBackward0>)
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(_shape(shape)))

    def forward(self, x: Tensor) -> Tensor:
        _check("Shift", x, self.bias)
        return x + self.bias

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 1.0

    def extra_repr(self) -> str:
        return f"{tuple(self.bias.shape)}"


class Gain(Layer):
    """Multiply by learned numbers g / max(1, max |g|), none of which exceeds 1; at first 1.

    Arguments:
        shape: Shape of the numbers, repeated as in `Shift`.

    Shape:
        (b, ...), to the same.

    >>> Gain((2,))(torch.ones(1, 2))
    tensor([[1., 1.]], grad_fn=<MulBackward0>)
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_shape(shape)))

    def forward(self, x: Tensor) -> Tensor:
        _check("Gain", x, self.weight)
        largest = self.weight.abs().max()
        return x * (self.weight / torch.where(largest > 1, largest, 1))  # clamp_min has no gradient at the first g = 1

    def lipschitz(self, shape: Sequence[int]) -> float:
        if not bool(self.weight.isfinite().all()):
            return math.nan
        largest = float(self.weight.double().abs().max())
        return min(1.0, largest) * (1 + 4 * torch.finfo(self.weight.dtype).eps)  # the quotient is rounded

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 4.0

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}"


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(positive_int("shape", n) for n in shape)


def _check(name: str, x: Tensor, numbers: Tensor) -> None:
    """Raise an error if the numbers would repeat the input, or tell examples of a batch apart."""
    sides = x.shape[x.ndim - numbers.ndim :]
    if x.ndim <= numbers.ndim or any(m not in (1, n) for n, m in zip(sides, numbers.shape, strict=True)):
        raise ValueError(f"{name} takes a batch whose axes fit {tuple(numbers.shape)}, got shape {tuple(x.shape)}")
