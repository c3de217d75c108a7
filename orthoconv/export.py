"""A model as plain modules of real arithmetic: what ONNX, torch.export and torch.compile take as it is."""

__all__ = ["export"]

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.lipschitz import zeros
from orthoconv.nn.activation import MaxMin
from orthoconv.nn.base import BaseConv2d
from orthoconv.nn.downsample import depth_to_space, space_to_depth
from orthoconv.nn.kernel import KernelConv2d, padding
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.memory import Pair, Reparametrized, frozen
from orthoconv.tracing import calls, replace_modules


def export(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """`model` with each layer of this library as it is now, for inputs of one shape: no transform, no complex numbers.

    Operators are fixed, as in eval mode, and are not trained on. A convolution by a kernel becomes torch's, with
    circular padding; one that is made in the Fourier domain becomes a Fourier transform by products with real matrices.

    Arguments:
        model: Any model; what is not of this library is copied as it is.
        input_shape: Shape of one input, without the batch, which stays free.

    Returns:
        A copy in eval mode, equal to ``model.eval()`` up to rounding.

    >>> from orthoconv.nn import CayleyConv2d
    >>> model = nn.Sequential(CayleyConv2d(3, 8, 3), MaxMin()).eval()
    >>> plain, x = export(model, (3, 8, 8)), torch.rand(2, 3, 8, 8)
    >>> torch.dist(plain(x), model(x)).item() < 1e-5
    True
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    shapes = _shapes(model, input_shape)
    with torch.no_grad(), frozen(model):
        plain = {m: _plain(m, shapes.get(id(m)), name) for name, m in model.named_modules() if _is_ours(m)}
    replace_modules(model, plain)
    return plain.get(model, model).eval()


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, Reparametrized | MaxMin)


def _shapes(model: nn.Module, input_shape: Sequence[int]) -> dict[int, torch.Size]:
    """Shape of the input of each layer, which must be one."""
    found: dict[int, torch.Size] = {}
    for _, module, x in calls(model, zeros(model, input_shape)):
        shape = x.shape[1:]
        if isinstance(module, BaseConv2d) and found.setdefault(id(module), shape) != shape:
            raise ValueError(
                f"export takes layers that see images of one size; {module} sees {shape} and {found[id(module)]}"
            )
    return found


def _plain(module: nn.Module, shape: torch.Size | None, name: str) -> nn.Module:
    if isinstance(module, MaxMin):
        return PlainMaxMin(module.dim)
    if isinstance(module, BaseLinear):
        return _linear(module)
    if not isinstance(module, BaseConv2d):
        raise TypeError(f"export does not know {type(module).__name__}, at {name}")
    if shape is None:
        raise ValueError(f"export needs every convolution to be used in the forward pass; {name} ({module}) is not")
    return _convolution(module, (shape[-2], shape[-1]))


def _linear(layer: BaseLinear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    plain.weight = nn.Parameter(_owned(layer.recall()), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.clone(), requires_grad=False)
    return plain


def _convolution(layer: BaseConv2d, size: Pair) -> nn.Module:
    if layer.kernel_shape[2:] == (1, 1):
        inner = layer._inner_size(size)
        return PlainBlocks(_owned(layer.one_tap(inner).unflatten(1, (-1, *layer.stride))), layer)
    if isinstance(layer, KernelConv2d):
        return PlainCircular(_owned(layer.recall(layer._inner_size(size))), layer, size)
    return PlainSpectral(layer.spectrum(size), layer, size)


def _owned(x: Tensor) -> Tensor:
    """A copy of `x` in its own memory, in order."""
    return x.detach().clone(memory_format=torch.contiguous_format)


class PlainMaxMin(nn.Module):
    """MaxMin in two operations."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        dim = (1 if x.ndim > 1 else 0) if self.dim is None else self.dim
        a, b = x.chunk(2, dim)
        return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim)


class _Plain(nn.Module):
    """What the plain convolutions share: bias, stride, direction, and the size that they are for."""

    def __init__(self, layer: BaseConv2d) -> None:
        super().__init__()
        self.stride, self.dilation, self.groups, self.transposed = (
            layer.stride, layer.dilation, layer.groups, layer.transposed,
        )  # fmt: skip
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    bias: Tensor | None


class PlainBlocks(_Plain):
    """One matrix for each block of pixels."""

    weight: Tensor

    def __init__(self, weight: Tensor, layer: BaseConv2d) -> None:
        super().__init__(layer)
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        apply = F.conv_transpose2d if self.transposed else F.conv2d
        return apply(x, self.weight, self.bias, stride=self.stride, groups=self.groups)


class _Sized(_Plain, ABC):
    """A convolution for images of one size, after the downsampling."""

    def __init__(self, layer: BaseConv2d, size: Pair) -> None:
        super().__init__(layer)
        self.size = size
        inner = layer._divide(size, (1, 1) if layer.transposed else layer.stride)
        self.margin = [torus - n for torus, n in zip(layer._torus(inner), inner, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) != self.size:
            raise ValueError(f"this model was exported for images of {self.size} here, got {tuple(x.shape[-2:])}")
        x = x if self.transposed else space_to_depth(x, self.stride)
        h, w = x.shape[-2:]
        if any(self.margin):  # padding by zeros
            x = F.pad(x, (0, self.margin[1], 0, self.margin[0]))
        y = self.convolve(x)[..., :h, :w]
        y = depth_to_space(y, self.stride) if self.transposed else y
        return y if self.bias is None else y + self.bias[:, None, None]

    @abstractmethod
    def convolve(self, x: Tensor) -> Tensor:
        """The convolution itself, or its adjoint if the layer is transposed."""


class PlainCircular(_Sized):
    """A kernel in space, on an image that is continued periodically."""

    weight: Tensor

    def __init__(self, kernel: Tensor, layer: BaseConv2d, size: Pair) -> None:
        super().__init__(layer, size)
        self.before, self.after = padding((kernel.shape[2], kernel.shape[3]), layer.dilation)
        if layer.transposed:
            kernel = kernel.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1).flip(-2, -1)
            self.before, self.after = self.after, self.before
        self.register_buffer("weight", kernel.contiguous())

    def convolve(self, x: Tensor) -> Tensor:
        for axis, before, after in zip((-2, -1), self.before, self.after, strict=True):
            x = _wrap(x, axis, before, after)
        return F.conv2d(x, self.weight, dilation=self.dilation, groups=self.groups)


def _wrap(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """`x` continued periodically along an axis, by slices alone."""
    n = x.shape[axis]
    parts = [x] * (1 + before // n + after // n)
    if before % n:
        parts.insert(0, x.narrow(axis, n - before % n, before % n))
    if after % n:
        parts.append(x.narrow(axis, 0, after % n))
    return torch.cat(parts, axis)


class PlainSpectral(_Sized):
    """One matrix for each frequency, between two Fourier transforms by real matrices (Algorithm 1, without FFT)."""

    matrices: Tensor
    cos_h: Tensor
    sin_h: Tensor
    cos_w: Tensor
    sin_w: Tensor
    back_cos_w: Tensor
    back_sin_w: Tensor

    def __init__(self, spectrum: Tensor, layer: BaseConv2d, size: Pair) -> None:
        super().__init__(layer, size)
        D = spectrum.mH if layer.transposed else spectrum  # (g, f, o, i)
        h, w = layer._inner_size(size)
        if not D.is_complex():
            D = D.expand(-1, h * (w // 2 + 1), -1, -1).to(
                torch.complex64 if D.dtype == torch.float32 else torch.complex128
            )
        real = D.real.dtype
        blocks = torch.cat((torch.cat((D.real, -D.imag), -1), torch.cat((D.imag, D.real), -1)), -2)
        self.register_buffer("matrices", _owned(blocks.transpose(0, 1)))  # (f, g, 2 o, 2 i)
        weights = torch.full((w // 2 + 1,), 2.0, dtype=torch.float64)  # a frequency and its conjugate
        weights[0] = 1
        if w % 2 == 0:
            weights[-1] = 1
        tables = {"h": _angles(h, h), "w": _angles(w, w // 2 + 1)}
        for name, angle in tables.items():
            self.register_buffer(f"cos_{name}", angle.cos().to(real))
            self.register_buffer(f"sin_{name}", angle.sin().to(real))
        back = weights[:, None] / (h * w)
        self.register_buffer("back_cos_w", _owned((back * tables["w"].cos().mT).to(real)))
        self.register_buffer("back_sin_w", _owned((back * tables["w"].sin().mT).to(real)))

    def convolve(self, x: Tensor) -> Tensor:
        h, w = x.shape[-2:]
        re, im = x @ self.cos_w, -(x @ self.sin_w)  # along the rows
        re, im = self.cos_h @ re + self.sin_h @ im, self.cos_h @ im - self.sin_h @ re  # and the columns
        z = torch.stack((re, im), 1).unflatten(2, (self.groups, -1))  # (b, 2, g, i, h, w / 2 + 1)
        z = z.permute(4, 5, 2, 1, 3, 0).flatten(3, 4).flatten(0, 1)  # (f, g, 2 i, b)
        z = (self.matrices @ z).unflatten(0, (h, w // 2 + 1)).unflatten(3, (2, -1))  # (h, w / 2 + 1, g, 2, o, b)
        z = z.permute(3, 5, 2, 4, 0, 1).flatten(2, 3)  # (2, b, o, h, w / 2 + 1)
        re, im = z[0], z[1]
        re, im = self.cos_h @ re - self.sin_h @ im, self.cos_h @ im + self.sin_h @ re
        return torch.sub(re @ self.back_cos_w, im @ self.back_sin_w)


def _angles(n: int, frequencies: int) -> Tensor:
    """2 pi k j / n for pixels k and frequencies j, (n, frequencies), without losing digits to large angles."""
    product = torch.arange(n)[:, None] * torch.arange(frequencies) % n
    return product.to(torch.float64) * (2 * math.pi / n)
