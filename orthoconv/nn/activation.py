"""Activations that permute their inputs, and so keep norms and gradient norms (Anil, Lucas and Grosse, 2019)."""

__all__ = ["GroupSort", "MaxMin"]

from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.nn.base import positive_int
from orthoconv.tracing import is_concrete, is_eager, is_forward_mode


class GroupSort(nn.Module):
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
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        dim = _axis(x, self.dim, "GroupSort")
        groups = _split(x, dim, self.group_size, "GroupSort")  # (b, group_size, n, ...)
        return groups.sort(dim=dim, descending=True).values.flatten(dim, dim + 1)

    def extra_repr(self) -> str:
        return f"{self.group_size}"


class MaxMin(nn.Module):
    """`GroupSort` of two: the larger of channels c and c + n / 2, then the smaller ones; `dim` as there.

    >>> MaxMin()(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[3., 4., 1., 2.]])
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        dim = _axis(x, self.dim, "MaxMin")
        _split(x, dim, 2, "MaxMin")
        if not torch.is_grad_enabled() and is_eager(x):
            return _MaxMin.forward(x, dim)  # nothing is to be saved for a gradient
        if is_forward_mode():
            a, b = x.chunk(2, dim)
            return _swap(x, a >= b, dim)
        y: Tensor = _MaxMin.apply(x, dim)
        return y


class _MaxMin(torch.autograd.Function):
    """Maximum and minimum of two halves; the gradient goes where the value came from, ties included."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        a, b = x.chunk(2, dim)
        if not is_concrete(x):
            return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim)
        y = torch.empty_like(x)
        larger, smaller = y.chunk(2, dim)
        torch.maximum(a, b, out=larger)
        torch.minimum(a, b, out=smaller)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        x, ctx.dim = inputs
        a, b = x.chunk(2, ctx.dim)
        ctx.save_for_backward(a >= b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (first,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_concrete(grad, first):
            return _swap(grad, first, ctx.dim), None
        g, (larger, smaller) = torch.empty_like(grad), grad.chunk(2, ctx.dim)
        a, b = g.chunk(2, ctx.dim)
        torch.where(first, larger, smaller, out=a)
        torch.where(first, smaller, larger, out=b)
        return g, None


def _swap(x: Tensor, first: Tensor, dim: int) -> Tensor:
    """Both halves of `x`, as they are where `first` is true, in each other's place where it is not."""
    a, b = x.chunk(2, dim)
    return torch.cat((torch.where(first, a, b), torch.where(first, b, a)), dim)


def _axis(x: Tensor, dim: int | None, name: str) -> int:
    if x.ndim == 0 or (x.ndim == 3 and dim is None):
        raise ValueError(f"{name} needs dim= to know the channels of an input of shape {tuple(x.shape)}")
    return min(1, x.ndim - 1) if dim is None else dim % x.ndim


def _split(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    if x.shape[dim] % size:
        raise ValueError(f"{name} takes a number of channels that {size} divides, got shape {tuple(x.shape)}")
    groups: Tensor = x.unflatten(dim, (size, -1))
    return groups
