"""Activations that permute their inputs, and so keep norms and gradient norms (Anil, Lucas and Grosse, 2019)."""

__all__ = ["FullSort", "GroupSort", "MaxMin"]

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.nn.arguments import axis, channel_axis, positive_int
from orthoconv.nn.layer import Permutation
from orthoconv.nn.plain import PlainMaxMin
from orthoconv.tracing import is_eager

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of as many bytes as a floating-point number


class GroupSort(Permutation):
    """Sort channels in groups, in descending order: channel c with c + n, c + 2 n, ... of group_size * n channels.

    Arguments:
        group_size: Channels in a group; it divides the number of channels.
        dim: Axis of the channels; by default 1, or 0 for a vector. Inputs with three axes need it, since they may be a
            batch of sequences or one image.

    Shape:
        (b, c, ...), to the same.

    >>> GroupSort(3)(torch.tensor([[1.0, 5.0, 2.0]]))
    tensor([[5., 2., 1.]])
    """

    def __init__(self, group_size: int, dim: int | None = None) -> None:
        super().__init__()
        self.group_size = positive_int("group_size", group_size)
        self.dim = None if dim is None else axis("dim", dim)

    def forward(self, x: Tensor) -> Tensor:
        dim = channel_axis("GroupSort", x, self.dim)
        groups = _split(x, dim, self.group_size, "GroupSort")  # (b, group_size, n, ...)
        return groups.sort(dim=dim, descending=True).values.flatten(dim, dim + 1)

    def extra_repr(self) -> str:
        return f"{self.group_size}"


class FullSort(Permutation):
    """Sort all channels, in descending order: `GroupSort` of as many as there are.

    Arguments:
        dim: Axis of the channels, as in `GroupSort`.

    Shape:
        (b, c, ...), to the same.

    >>> FullSort()(torch.tensor([[1.0, 5.0, 2.0, 3.0]]))
    tensor([[5., 3., 2., 1.]])
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = None if dim is None else axis("dim", dim)

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(dim=channel_axis("FullSort", x, self.dim), descending=True).values


class MaxMin(Permutation):
    """`GroupSort` of two: the larger of channels c and c + n / 2, then the smaller ones.

    Arguments:
        dim: Axis of the channels, as in `GroupSort`.

    Shape:
        (b, c, ...), to the same; c is even.

    >>> MaxMin()(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[3., 4., 1., 2.]])
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = None if dim is None else axis("dim", dim)

    def forward(self, x: Tensor) -> Tensor:
        dim = channel_axis("MaxMin", x, self.dim)
        _split(x, dim, 2, "MaxMin")
        forward, backward = partial(_forward, dim), partial(_backward, dim)
        return with_gradient((x,), partial(_ordinary, dim), forward, backward, keep_inputs=False)

    def exported(self, shape: Sequence[int]) -> nn.Module:
        return PlainMaxMin(self.dim)


def _ordinary(dim: int, x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim)
    return _swap(x, a >= b, dim)


def _forward(dim: int, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    y, (a, b) = torch.empty_like(x), x.chunk(2, dim)
    larger, smaller = y.chunk(2, dim)
    torch.maximum(a, b, out=larger)
    torch.minimum(a, b, out=smaller)
    return y, (a >= b,) if x.requires_grad else ()


def _backward(dim: int, grad: Tensor, needed: Sequence[bool], inputs: object, kept: tuple[Tensor, ...]) -> Tensors:
    """Send the gradient to where the value came from, ties included."""
    (first,) = kept
    fast = budget.has_cache(grad.device) and is_eager(grad) and not torch.is_grad_enabled()
    return (_swap_bits(grad, first, dim) if fast else _swap(grad, first, dim),)


def _swap(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """Exchange the two halves of `x` where `first` is false."""
    a, b = x.chunk(2, dim)
    return torch.cat((torch.where(first, a, b), torch.where(first, b, a)), dim)


def _swap_bits(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """`_swap` by bitwise operations: torch.where takes five times as long on a CPU, as it branches at each entry."""
    x = x.resolve_neg()
    y, bits = torch.empty_like(x), _BITS[x.element_size()]
    (a, b), (c, d) = x.view(bits).chunk(2, dim), y.view(bits).chunk(2, dim)
    torch.bitwise_xor(a, b, out=c)
    c.bitwise_and_(first.to(bits).neg_())  # a ^ b where `first`, 0 elsewhere
    torch.bitwise_xor(a, c, out=d)
    c.bitwise_xor_(b)
    return y


def _split(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    if x.shape[dim] % size:
        raise ValueError(f"{name} takes a number of channels that {size} divides, got shape {tuple(x.shape)}")
    groups: Tensor = x.unflatten(dim, (size, -1))
    return groups
