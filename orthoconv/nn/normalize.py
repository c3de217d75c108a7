"""Fixed affine maps as layers, so that inputs stay in [0, 1] and the bound of a model counts them."""

__all__ = ["Normalize", "Scale"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv.nn.arguments import number
from orthoconv.nn.layer import Layer


class Normalize(Layer):
    """Compute (x - mean) / std for each channel; without `std`, x - mean, which leaves distances as they are.

    Arguments:
        mean: A number for each channel.
        std: A positive number for each channel, or None.

    Shape:
        (..., c, h, w), to the same.

    >>> Normalize([0.5], [0.25])(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float] | None = None) -> None:
        super().__init__()
        if not isinstance(mean, Sequence) or not isinstance(std, Sequence | None):
            raise ValueError(f"Normalize takes sequences with a number for each channel, got {mean!r} and {std!r}")
        std = [1.0] * len(mean) if std is None else std
        if len(mean) != len(std):
            raise ValueError(f"Normalize takes a finite mean and as many std as channels, got {mean!r} and {std!r}")
        means = [number("Normalize takes numbers: each mean", v, "finite", math.isfinite) for v in mean]
        deviations = [
            number("Normalize takes numbers: each std", v, "positive and finite", lambda v: 0 < v < math.inf)
            for v in std
        ]
        self.register_buffer("mean", torch.tensor(means, dtype=torch.get_default_dtype()))
        self.register_buffer("std", torch.tensor(deviations, dtype=torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 3 or x.shape[-3] != len(self.mean):
            raise ValueError(f"Normalize takes images with {len(self.mean)} channels, got shape {tuple(x.shape)}")
        return (x - self.mean[:, None, None]) / self.std[:, None, None]

    def lipschitz(self, shape: Sequence[int]) -> float:
        if not bool((self.std > 0).all()):  # as a state dict may have it
            raise ValueError(f"Normalize takes standard deviations that are positive, got {self.std.tolist()}")
        return 1 / float(self.std.double().min())

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 4 * self.lipschitz(shape)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


class Scale(Layer):
    """Multiply by a fixed number. After another layer it sets the Lipschitz constant of both together.

    Arguments:
        factor: The number.

    Shape:
        Any, to the same.

    >>> Scale(0.5)(torch.ones(2))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = number("factor", factor, "a number that is finite", math.isfinite)

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def lipschitz(self, shape: Sequence[int]) -> float:
        return abs(self.factor)

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 2 * abs(self.factor)

    def extra_repr(self) -> str:
        return f"{self.factor}"
