"""Activations that permute their inputs, and so keep norms and gradient norms (Anil, Lucas and Grosse, 2019)."""

__all__ = ["GroupSort", "MaxMin"]

from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.nn.base import check_positive


class GroupSort(nn.Module):
    """Sort channels in groups, in descending order: channel c with c + n, c + 2 n, ... of group_size * n channels.

    Arguments:
        group_size: Channels in a group; it divides the number of channels.

    Shape:
        (b, c, ...), to the same; or (c,).

    >>> GroupSort(3)(torch.tensor([[1.0, 5.0, 2.0]]))
    tensor([[5., 2., 1.]])
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        check_positive(group_size=group_size)
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        groups = _split(x, self.group_size, "GroupSort")  # (b, group_size, n, ...)
        dim = min(1, x.ndim - 1)
        return groups.sort(dim=dim, descending=True).values.flatten(dim, dim + 1)

    def extra_repr(self) -> str:
        return f"{self.group_size}"


class MaxMin(nn.Module):
    """`GroupSort` of two: the larger of channels c and c + n / 2, then the smaller ones.

    >>> MaxMin()(torch.tensor([[1.0, 4.0, 3.0, 2.0]]))
    tensor([[3., 4., 1., 2.]])
    """

    def forward(self, x: Tensor) -> Tensor:
        dim = min(1, x.ndim - 1)
        y: Tensor = _MaxMin.apply(*_split(x, 2, "MaxMin").unbind(dim), dim)
        return y


class _MaxMin(torch.autograd.Function):
    """Concatenated maximum and minimum; the gradient goes where the value came from, ties included."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, dim: int) -> Tensor:
        return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        a, b, ctx.dim = inputs
        ctx.save_for_backward(a >= b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (first,) = ctx.saved_tensors
        larger, smaller = grad.chunk(2, ctx.dim)
        return torch.where(first, larger, smaller), torch.where(first, smaller, larger), None


def _split(x: Tensor, size: int, name: str) -> Tensor:
    dim = min(1, x.ndim - 1)
    if x.ndim == 0 or x.shape[dim] % size:
        raise ValueError(f"{name} takes a number of channels that {size} divides, got shape {tuple(x.shape)}")
    groups: Tensor = x.unflatten(dim, (size, -1))
    return groups
