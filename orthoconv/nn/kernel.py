"""Convolutions by a kernel in space, however the kernel is made."""

from __future__ import annotations

__all__ = ["KernelConv2d", "WeightConv2d", "add_channels", "kernel_units", "same_conv2d", "wrap"]

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import budget, fourier
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.fourier import padding
from orthoconv.linalg import frobenius_norm
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.nn.geometry import Geometry, UncroppedGeometry
from orthoconv.nn.plain import PlainKernel
from orthoconv.tracing import is_eager


class KernelConv2d(BaseConv2d):
    """Convolution by a kernel (o, i / groups, kh, kw) that is computed from parameters; abstract.

    A method is a subclass with an `operator` that returns the kernel. `convolve` pads by zeros itself, so it gets the
    image as it is. A subclass with a `convolve` of its own that is circular sets ``geometry_type = Geometry``.

    Arguments are those of `BaseConv2d`.

    >>> class Identity(KernelConv2d):
    ...     identity = True
    ...
    ...     def operator(self, size, *sources):
    ...         return torch.eye(self.out_channels, self.in_channels)[:, :, None, None]
    >>> x = torch.rand(1, 2, 4, 4)
    >>> torch.equal(Identity(2, 2, 1, bias=False)(x), x)
    True
    """

    geometry_type: ClassVar[type[Geometry]] = UncroppedGeometry
    depends_on_size: ClassVar[bool] = False

    @property
    def kernel(self) -> Tensor:
        """The kernel that is applied."""
        if self.depends_on_size:
            raise ValueError(f"the kernel of {type(self).__name__} depends on the image; use cached_operator((h, w))")
        return self.inner_kernel(self.operator((1, 1), *self.sources()))

    def inner_kernel(self, operator: Tensor) -> Tensor:
        """Kernel of the inner convolution, from the operator; a subclass may have another operator than its kernel."""
        return operator

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        geometry, size = self.geometry, (x.shape[-2], x.shape[-1])
        kernel, zeros = self._inner_kernel_for(geometry.torus(size)), geometry.is_cropped
        return same_conv2d(x, kernel, bias, geometry.inner_dilation, self.groups, adjoint=adjoint, zeros=zeros)

    def one_tap(self, size: Pair) -> Tensor:
        return self._inner_kernel_for(size)[:, :, 0, 0]

    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        size = self.geometry.inner_size(size)
        kernel = self._inner_kernel_for(size)
        kernel = kernel.double() if double else kernel
        return fourier.spectrum(kernel, size, dilation=self.geometry.inner_dilation, groups=self.groups)

    def inner_units(self, size: Pair) -> float:
        """Return the larger of two: in space in the layer's own precision, by its spectrum in float64."""
        kernel = self._inner_kernel_for(size)
        norm = math.sqrt(math.prod(self.geometry.taps)) * frobenius_norm(kernel)
        return max(self.spectral_units(size, norm), kernel_units(kernel))

    def inner_in_double(self, size: Pair) -> Callable[[Tensor], Tensor]:
        if not self.geometry.is_cropped:
            return super().inner_in_double(size)
        return PlainKernel(self.geometry, self._inner_kernel_for(self.geometry.inner_size(size)).double())

    def exported_inner(self, size: Pair) -> nn.Module:
        return PlainKernel(self.geometry, self._inner_kernel_for(self.geometry.inner_size(size)))

    def _inner_kernel_for(self, size: Pair) -> Tensor:
        return self.inner_kernel(self.cached_operator(size))


class WeightConv2d(KernelConv2d):
    """`KernelConv2d` whose one parameter, besides the bias, is a kernel `weight` as nn.Conv2d has it; abstract.

    Arguments are those of `BaseConv2d`, and

        identity: Whether the weight starts as the identity kernel; otherwise as that of nn.Conv2d.

    >>> class Halved(WeightConv2d):
    ...     def operator(self, size, *sources):
    ...         return sources[0] / 2
    >>> layer = Halved(3, 8, 3)
    >>> torch.equal(layer.kernel, layer.weight / 2)
    True
    """

    def set_up(self, *, identity: bool = False) -> None:
        self.identity = bool(identity)
        super().set_up()

    @torch.no_grad()
    def start_from(self, kernel: Tensor) -> None:
        self.weight.copy_(kernel)


def same_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dilation: Pair = (1, 1),
    groups: int = 1,
    *,
    adjoint: bool = False,
    zeros: bool = False,
) -> Tensor:
    """Convolution of (b, i, h, w) by (o, i / groups, kh, kw), centred as in `fourier`; or its adjoint.

    It is circular, or pads by `zeros`. Images keep their size.

    >>> x, y, weight = torch.randn(1, 2, 5, 4), torch.randn(1, 3, 5, 4), torch.randn(3, 2, 2, 3)
    >>> a, b = same_conv2d(x, weight), same_conv2d(y, weight, adjoint=True)
    >>> torch.isclose((a * y).sum(), (x * b).sum(), atol=1e-4).item()
    True
    """
    before, after = padding((weight.shape[2], weight.shape[3]), dilation)
    if adjoint:
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(-2, -1)
        before, after = after, before
    inside = zeros and before == after  # torch pads without a copy
    if not inside:
        x = F.pad(x, (before[1], after[1], before[0], after[0])) if zeros else wrap(x, before, after)
    few = (
        math.prod(weight.shape[1:]) <= budget.LIFTED_RATIO * len(weight)
        and math.prod(x.shape[2:]) > budget.DENSE_PIXELS
    )
    if few and groups == 1 and dilation == (1, 1) and x.requires_grad and budget.has_cache(x.device):
        return _convolve_few(F.pad(x, (before[1], after[1], before[0], after[0])) if inside else x, weight, bias)
    return F.conv2d(x, weight, bias, 1, before if inside else 0, dilation, groups)


def _convolve_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve images of few channels; the gradient by one product and a sum over taps takes half of torch's time."""
    h, w = (n - k + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True))

    def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
        x, weight, bias = inputs
        gx = None
        if needed[0]:
            taps = weight.permute(2, 3, 1, 0).flatten(0, 2) @ grad.flatten(2)  # (b, kh kw i, h w)
            gx = torch.zeros_like(x, memory_format=torch.contiguous_format)
            offsets = itertools.product(range(weight.shape[2]), range(weight.shape[3]))
            for (r, s), part in zip(offsets, taps.split(weight.shape[1], 1), strict=True):
                gx[:, :, r : r + h, s : s + w] += part.unflatten(2, (h, w))
        mask = [False, bool(needed[1]), bias is not None and bool(needed[2])]
        sizes = None if bias is None else [len(bias)]
        gradients = torch.ops.aten.convolution_backward(
            grad, x, weight, sizes, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
        )
        return gx, gradients[1], gradients[2]

    return with_gradient((x, weight, bias), F.conv2d, lambda *inputs: (F.conv2d(*inputs), ()), backward)


def add_channels(y: Tensor, x: Tensor, groups: int = 1) -> Tensor:
    """Add images (b, g i, h, w) to the first channels of each group of `y` (b, g o, h, w), which is overwritten.

    Channels of `x` beyond those of `y` are left out. Neither direction copies an image.

    >>> add_channels(torch.zeros(1, 3, 1, 1), torch.ones(1, 2, 1, 1)).flatten()
    tensor([1., 1., 0.])
    """
    if is_eager(y, x) and torch.is_grad_enabled():
        total: Tensor = _AddChannels.apply(y, x, groups)  # type: ignore[no-untyped-call]
        return total
    if is_eager(y, x):
        return _add_channels(y, x, groups)
    x = x.unflatten(1, (groups, -1))
    return y + _fit(x, y.shape[1] // groups).flatten(1, 2)


class _AddChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, groups: int) -> Tensor:
        ctx.mark_dirty(y)
        ctx.groups, ctx.channels = groups, x.shape[1] // groups
        return _add_channels(y, x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        return grad, _fit(grad.unflatten(1, (ctx.groups, -1)), ctx.channels).flatten(1, 2), None


def _add_channels(y: Tensor, x: Tensor, groups: int) -> Tensor:
    n = min(y.shape[1], x.shape[1]) // groups
    y.unflatten(1, (groups, -1))[:, :, :n].add_(x.unflatten(1, (groups, -1))[:, :, :n])
    return y


def _fit(x: Tensor, n: int) -> Tensor:
    """Keep the first n channels of each group of (b, g, c, h, w), or append channels of zeros."""
    return x[:, :, :n] if x.shape[2] >= n else F.pad(x, (0, 0, 0, 0, 0, n - x.shape[2]))


def kernel_units(kernel: Tensor) -> float:
    """Rounding of a convolution in space, in units, relative to the norm of the input."""
    taps = kernel[0, 0].numel()
    return (taps * (max(kernel.shape[:2]) + 1) + 2) * math.sqrt(taps) * frobenius_norm(kernel)


def wrap(x: Tensor, before: Pair, after: Pair) -> Tensor:
    """Continue `x` periodically by so many rows and columns, which may be more than it has."""
    (h, w), (top, left), (bottom, right) = x.shape[-2:], before, after
    if top == left == bottom == right == 0:
        return x
    if max(top, bottom) <= h and max(left, right) <= w:

        def pad(x: Tensor) -> Tensor:
            return F.pad(x, (left, right, top, bottom), mode="circular")

        def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
            return (_unwrap(_unwrap(grad, -2, top, h), -1, left, w),)  # torch's own fills a tensor for each side

        return with_gradient((x,), pad, lambda x: (pad(x), ()), backward, keep_inputs=False)
    rows, columns = torch.arange(-top, h + bottom) % h, torch.arange(-left, w + right) % w
    return x[..., rows[:, None].to(x.device), columns.to(x.device)]


def _unwrap(grad: Tensor, axis: int, before: int, n: int) -> Tensor:
    """Add what stands before and after the n rows or columns of a continued image to those that it repeats."""
    after = grad.shape[axis] - before - n
    if before == after == 0:
        return grad
    own = grad.narrow(axis, before, n).clone(memory_format=torch.contiguous_format)
    if before:
        own.narrow(axis, n - before, before).add_(grad.narrow(axis, 0, before))
    if after:
        own.narrow(axis, 0, after).add_(grad.narrow(axis, before + n, after))
    return own
