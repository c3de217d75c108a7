"""Convolutions by a kernel in space, however the kernel is made."""

__all__ = ["KernelConv2d", "circular_conv2d"]

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

    def convolve(self, x: Tensor, operator: Tensor, *, adjoint: bool) -> Tensor:
        return circular_conv2d(x, operator, self.dilation, self.groups, adjoint=adjoint)

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
    x: Tensor, weight: Tensor, dilation: Pair = (1, 1), groups: int = 1, *, adjoint: bool = False
) -> Tensor:
    """Circular convolution of (b, i, h, w) by (o, i / groups, kh, kw), centred as in `fourier`; or its adjoint.

    >>> x, y, weight = torch.randn(1, 2, 5, 4), torch.randn(1, 3, 5, 4), torch.randn(3, 2, 2, 3)
    >>> a, b = circular_conv2d(x, weight), circular_conv2d(y, weight, adjoint=True)
    >>> torch.isclose((a * y).sum(), (x * b).sum(), atol=1e-4).item()
    True
    """
    spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    before, after = [s // 2 for s in spans], [s - s // 2 for s in spans]
    if adjoint:
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(-2, -1)
        before, after = after, before
    return F.conv2d(_wrap(x, before, after), weight, dilation=dilation, groups=groups)


def _wrap(x: Tensor, before: list[int], after: list[int]) -> Tensor:
    """`x` continued periodically by so many rows and columns, which may be more than it has."""
    (h, w), (top, left), (bottom, right) = x.shape[-2:], before, after
    if top == left == bottom == right == 0:
        return x
    if max(top, bottom) <= h and max(left, right) <= w:
        return F.pad(x, (left, right, top, bottom), mode="circular")
    rows, columns = torch.arange(-top, h + bottom) % h, torch.arange(-left, w + right) % w
    return x[..., rows[:, None].to(x.device), columns.to(x.device)]
