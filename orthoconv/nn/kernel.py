"""Convolutions by a kernel in space, however the kernel is made."""

__all__ = ["KernelConv2d", "circular_conv2d", "padding", "wrap"]

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import fourier
from orthoconv.nn.base import BaseConv2d
from orthoconv.nn.memory import Pair


class KernelConv2d(BaseConv2d):
    """Circular convolution by a kernel (o, i / groups, kh, kw) that is computed from parameters; abstract."""

    depends_on_size: ClassVar[bool] = False

    @property
    def kernel(self) -> Tensor:
        """The kernel that is applied."""
        if self.depends_on_size:
            raise ValueError(f"the kernel of {type(self).__name__} depends on the image; use recall((h, w))")
        return self.operator((1, 1), *self.sources())

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        kernel = self.recall((x.shape[-2], x.shape[-1]))
        return circular_conv2d(x, kernel, bias, self.dilation, self.groups, adjoint=adjoint)

    def one_tap(self, size: Pair) -> Tensor:
        return self.recall(size)[:, :, 0, 0]

    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        size = self._inner_size(size)
        kernel = self.recall(size)
        kernel = kernel.double() if double else kernel
        return fourier.spectrum(kernel, size, dilation=self.dilation, groups=self.groups)


class WeightConv2d(KernelConv2d):
    """`KernelConv2d` whose one parameter, besides the bias, is a kernel `weight` as nn.Conv2d has it; abstract."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = nn.Parameter(torch.empty(self.kernel_shape, **self._factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's initialisation of a convolution."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.reset_bias()

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)


def circular_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dilation: Pair = (1, 1),
    groups: int = 1,
    *,
    adjoint: bool = False,
) -> Tensor:
    """Circular convolution of (b, i, h, w) by (o, i / groups, kh, kw), centred as in `fourier`; or its adjoint.

    >>> x, y, weight = torch.randn(1, 2, 5, 4), torch.randn(1, 3, 5, 4), torch.randn(3, 2, 2, 3)
    >>> a, b = circular_conv2d(x, weight), circular_conv2d(y, weight, adjoint=True)
    >>> torch.isclose((a * y).sum(), (x * b).sum(), atol=1e-4).item()
    True
    """
    before, after = padding((weight.shape[2], weight.shape[3]), dilation)
    if adjoint:
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(-2, -1)
        before, after = after, before
    return F.conv2d(wrap(x, before, after), weight, bias, dilation=dilation, groups=groups)


def padding(k: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """Rows and columns that a kernel with so many taps reads before and after a pixel."""
    spans = dilation[0] * (k[0] - 1), dilation[1] * (k[1] - 1)
    before = spans[0] // 2, spans[1] // 2
    return before, (spans[0] - before[0], spans[1] - before[1])


def wrap(x: Tensor, before: Pair, after: Pair) -> Tensor:
    """`x` continued periodically by so many rows and columns, which may be more than it has."""
    (h, w), (top, left), (bottom, right) = x.shape[-2:], before, after
    if top == left == bottom == right == 0:
        return x
    if max(top, bottom) <= h and max(left, right) <= w:
        return F.pad(x, (left, right, top, bottom), mode="circular")
    rows, columns = torch.arange(-top, h + bottom) % h, torch.arange(-left, w + right) % w
    return x[..., rows[:, None].to(x.device), columns.to(x.device)]
