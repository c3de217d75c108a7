"""Residual connections that are not expansive (Section 5.1)."""

__all__ = [
    "ConcatResidual",
    "ConvexResidual",
    "ConvexSum",
    "PrescaledResidual",
    "UnitCat",
    "convex_weights",
    "unit_weights",
]

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import axis, module, number, positive_int
from orthoconv.nn.layer import Child, Combination, G
from orthoconv.nn.normalize import Scale


class ConvexResidual(Combination):
    """Convex combination s f(x) + (1 - s) skip(x), where s = sigmoid(alpha) is learned.

    It is 1-Lipschitz if `f` and `skip` are.

    Arguments:
        f: The residual branch.
        skip: The other branch; by default the identity.

    Shape:
        Any that both branches take, to the shape that both return.

    >>> ConvexResidual(nn.Tanh())(torch.zeros(3))
    tensor([0., 0., 0.], grad_fn=<AddBackward0>)
    """

    def __init__(self, f: nn.Module, skip: nn.Module | None = None) -> None:
        super().__init__()
        self.f = _keeping_its_input(f, "ConvexResidual")
        self.skip = nn.Identity() if skip is None else module("skip of ConvexResidual", skip)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.f(x), self.skip(x)
        _require_one_shape(y, z, "ConvexResidual")
        return torch.add(torch.sigmoid(self.alpha) * y, torch.sigmoid(-self.alpha) * z)  # 1 - s would lose its digits

    def growth(self, x: Tensor, child: Child[G]) -> G:
        f, skip = child("f", self.f, x), child("skip", self.skip, x)
        s, rest = convex_weights(self.alpha)
        return s * f + rest * skip


class PrescaledResidual(Combination):
    """Sum (x + f(a x)) / (1 + abs(a)), where the number a is learned; at first 1.

    It is 1-Lipschitz if `f` is. With a near 0 it is the identity, with a large one it leaves f(a x) / a alone.

    Arguments:
        f: The residual branch.

    Shape:
        Any that `f` takes and returns, to the same.

    >>> PrescaledResidual(nn.Tanh())(torch.zeros(3))
    tensor([0., 0., 0.], grad_fn=<AddBackward0>)
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = _keeping_its_input(f, "PrescaledResidual")
        self.alpha = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(self.alpha * x)
        _require_one_shape(y, x, "PrescaledResidual")
        weight = 1 / (1 + self.alpha.abs())
        return torch.add(weight * x, weight * y)

    def growth(self, x: Tensor, child: Child[G]) -> G:
        a = self.alpha.double().item()
        branch = child("alpha", Scale(a), x) * child("f", self.f, a * x)
        weight = 1 / (1 + abs(a))
        return weight * child("skip", nn.Identity(), x) + weight * branch


class ConcatResidual(Combination):
    """Apply `f` to the second half of the channels, and leave the first half as it is.

    It is 1-Lipschitz if `f` is, and orthogonal if `f` is. A `ChannelShuffle` of two groups mixes the halves.

    Arguments:
        f: The residual branch, for half of the channels.

    Shape:
        (b, c, ...) with an even c, to the channels of `f` after c / 2 others.

    >>> ConcatResidual(nn.ReLU())(torch.tensor([[-1.0, -2.0]]))
    tensor([[-1.,  0.]])
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = _keeping_its_input(f, "ConcatResidual")

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = self._halves(x)
        changed = self.f(changed)
        if changed.ndim != kept.ndim or changed.shape[2:] != kept.shape[2:]:
            raise ValueError(
                f"ConcatResidual needs branches that differ in their channels alone, got {tuple(kept.shape)} and "
                f"{tuple(changed.shape)}"
            )
        return torch.cat((kept, changed), 1)

    def growth(self, x: Tensor, child: Child[G]) -> G:
        kept, changed = self._halves(x)
        return child("skip", nn.Identity(), kept).parallel(child("f", self.f, changed))

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim < 2 or x.shape[1] % 2:
            raise ValueError(f"ConcatResidual takes (b, c, ...) with an even c, got shape {tuple(x.shape)}")
        first, second = x.chunk(2, 1)
        return first, second


class ConvexSum(nn.Module):
    """Convex combination s x + (1 - s) y of two inputs, where s = sigmoid(alpha) is learned; in place of a sum.

    Arguments:
        weight: The first s, between 0 and 1.

    Shape:
        Two inputs of one shape, to the same.

    >>> ConvexSum()(torch.zeros(3), torch.ones(3))
    tensor([0.5000, 0.5000, 0.5000], grad_fn=<AddBackward0>)
    """

    def __init__(self, weight: float = 0.5) -> None:
        super().__init__()
        weight = number("weight", weight, "between 0 and 1", lambda v: 0 < v < 1)
        self.alpha = nn.Parameter(torch.tensor(math.log(weight / (1 - weight))))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError(f"ConvexSum needs inputs of one shape, got {tuple(x.shape)} and {tuple(y.shape)}")
        return torch.add(torch.sigmoid(self.alpha) * x, torch.sigmoid(-self.alpha) * y)


class UnitCat(nn.Module):
    """Concatenation of n inputs, each times w_i, where the squares of the weights add up to 1; in place of `torch.cat`.

    The squares are the softmax of the learned `alpha`. It is 1-Lipschitz if the inputs are:
    |y|^2 = sum w_i^2 |x_i|^2 <= max |x_i|^2.

    Arguments:
        inputs: Number n of inputs.
        dim: Axis along which they are put side by side; not that of the batch.
        shares: Positive numbers that the first squares are in proportion to; by default they are equal.

    Shape:
        n inputs (b, ...) that differ along `dim` alone, to (b, ...).

    >>> UnitCat(4)(*[torch.ones(1, 1)] * 4)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]], grad_fn=<CatBackward0>)
    """

    def __init__(self, inputs: int, dim: int = 1, shares: Sequence[float] | None = None) -> None:
        super().__init__()
        self.dim = axis("dim", dim)
        if self.dim == 0:
            raise ValueError(f"dim must not be the axis of the batch, got {dim!r}")
        accepted = f"{positive_int('inputs', inputs)} positive numbers"
        given = [1.0] * inputs if shares is None else list(shares) if isinstance(shares, Iterable) else []
        if len(given) != inputs:
            raise ValueError(f"shares must be {accepted}, got {shares!r}")
        squares = [number("shares", share, accepted, lambda v: 0 < v < math.inf) for share in given]
        self.alpha = nn.Parameter(torch.tensor(squares).log())

    def forward(self, *xs: Tensor) -> Tensor:
        if len(xs) != len(self.alpha):
            raise ValueError(f"UnitCat takes {len(self.alpha)} inputs, got {len(xs)}")
        others = [x.shape[: self.dim] + x.shape[self.dim :][1:] for x in xs]
        if others[1:] != others[:-1] or not all(-x.ndim <= self.dim < x.ndim for x in xs):
            raise ValueError(
                f"UnitCat takes inputs (b, ...) that differ along the axis {self.dim} alone, got "
                f"{', '.join(str(tuple(x.shape)) for x in xs)}"
            )
        weights = torch.softmax(self.alpha, 0).sqrt()
        return torch.cat([w * x for w, x in zip(weights, xs, strict=True)], self.dim)

    def extra_repr(self) -> str:
        return f"{len(self.alpha)}, dim={self.dim}"


def unit_weights(alpha: Tensor) -> list[float]:
    """Return the weights of a `UnitCat`, found in float64."""
    weights: list[float] = torch.softmax(alpha.double(), 0).sqrt().tolist()
    return weights


def convex_weights(alpha: Tensor) -> tuple[float, float]:
    """Return sigmoid(alpha) and 1 minus it, each with all its digits."""
    return torch.sigmoid(alpha.double()).item(), torch.sigmoid(-alpha.double()).item()


def _keeping_its_input(f: nn.Module, name: str) -> nn.Module:
    for part, inner in module(f"f of {name}", f).named_modules():
        if getattr(inner, "inplace", False):
            raise ValueError(f"{name} needs its input unchanged, but {part or 'f'} is in place: {inner}")
    return f


def _require_one_shape(y: Tensor, z: Tensor, name: str) -> None:
    if y.shape != z.shape:
        raise ValueError(f"{name} needs branches of one shape, got {tuple(y.shape)} and {tuple(z.shape)}")
