"""Exported layers: real arithmetic and fixed operators, which ONNX, torch.export and torch.compile take as they are."""

__all__ = ["PlainBlocks", "PlainConv2d", "PlainKernel", "PlainMaxMin", "PlainSpectrum", "owned"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.fourier import padding
from orthoconv.nn.arguments import Pair
from orthoconv.nn.geometry import Geometry
from orthoconv.planes import COMPLEX


class PlainMaxMin(nn.Module):
    """MaxMin in two operations."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        dim = (1 if x.ndim > 1 else 0) if self.dim is None else self.dim
        a, b = x.chunk(2, dim)
        return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim)


class PlainBlocks(nn.Module):
    """One matrix Q (o, i / groups) for each block of pixels."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, geometry: Geometry, Q: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.geometry = geometry
        self.register_buffer("weight", owned(Q))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.geometry.apply_blocks(x, self.weight, self.bias, adjoint=self.geometry.transposed)


class PlainConv2d(nn.Module):
    """An inner convolution, a plain module, with what stands around it, for images of one size."""

    bias: Tensor | None

    def __init__(self, geometry: Geometry, size: Pair, inner: nn.Module, bias: Tensor | None) -> None:
        super().__init__()
        self.geometry, self.size, self.inner = geometry, size, inner
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        size = tuple(self.geometry.size_of(x.shape))
        if size != self.size:
            raise ValueError(f"this model was exported for images of {self.size} here, got {size}")
        y = self.geometry.around(x, self.inner, adjoint=self.geometry.transposed)
        return y if self.bias is None else y + self.geometry.as_image(self.bias)


class PlainKernel(nn.Module):
    """A kernel in space, on an image that is continued periodically or by zeros; or its adjoint, if transposed."""

    weight: Tensor

    def __init__(self, geometry: Geometry, kernel: Tensor) -> None:
        super().__init__()
        self.dilation, self.groups, self.zeros = geometry.inner_dilation, geometry.groups, geometry.is_cropped
        self.before, self.after = padding(geometry.taps, geometry.inner_dilation)
        if geometry.transposed:
            kernel = kernel.unflatten(0, (geometry.groups, -1)).transpose(1, 2).flatten(0, 1).flip(-2, -1)
            self.before, self.after = self.after, self.before
        self.register_buffer("weight", owned(kernel))

    def forward(self, x: Tensor) -> Tensor:
        if self.zeros:
            x = F.pad(x, (self.before[1], self.after[1], self.before[0], self.after[0]))
        else:
            for axis, before, after in zip((-2, -1), self.before, self.after, strict=True):
                x = _wrap(x, axis, before, after)
        return F.conv2d(x, self.weight, dilation=self.dilation, groups=self.groups)


def _wrap(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Continue `x` periodically along an axis, by slices alone."""
    n = x.shape[axis]
    parts = [x] * (1 + before // n + after // n)
    if before % n:
        parts.insert(0, x.narrow(axis, n - before % n, before % n))
    if after % n:
        parts.append(x.narrow(axis, 0, after % n))
    return torch.cat(parts, axis)


class PlainSpectrum(nn.Module):
    """One matrix for each frequency, between two Fourier transforms by real matrices (Algorithm 1, without FFT).

    Arguments:
        D: Matrices (g, f, o, i) at h rows and w // 2 + 1 columns of frequencies, or one real matrix for all.
        size: Height h and width w of the torus; or depth, height and width, and the input has depth times height rows.
    """

    matrices: Tensor
    cos_h: Tensor
    sin_h: Tensor
    cos_w: Tensor
    sin_w: Tensor
    back_cos_w: Tensor
    back_sin_w: Tensor

    def __init__(self, D: Tensor, size: Sequence[int]) -> None:
        super().__init__()
        *rows, w = size
        h, self.groups = math.prod(rows), len(D)
        D = D if D.is_complex() else D.expand(-1, h * (w // 2 + 1), -1, -1).to(COMPLEX[D.dtype])
        real = D.real.dtype
        blocks = torch.cat((torch.cat((D.real, -D.imag), -1), torch.cat((D.imag, D.real), -1)), -2)
        self.register_buffer("matrices", owned(blocks.transpose(0, 1)))  # (f, g, 2 o, 2 i)
        weights = torch.full((w // 2 + 1,), 2.0, dtype=torch.float64)  # a frequency and its conjugate
        weights[0] = 1
        if w % 2 == 0:
            weights[-1] = 1
        tables = {"h": _angles_of_rows(rows), "w": _angles(w, w // 2 + 1)}
        for name, angle in tables.items():
            self.register_buffer(f"cos_{name}", angle.cos().to(D.device, real))
            self.register_buffer(f"sin_{name}", angle.sin().to(D.device, real))
        back = weights[:, None] / (h * w)
        self.register_buffer("back_cos_w", owned((back * tables["w"].cos().mT).to(D.device, real)))
        self.register_buffer("back_sin_w", owned((back * tables["w"].sin().mT).to(D.device, real)))

    def forward(self, x: Tensor) -> Tensor:
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


def _angles_of_rows(sides: Sequence[int]) -> Tensor:
    """Sums of `_angles` for all combinations of pixels and frequencies of the sides, (h, h) with their product h."""
    angles = torch.zeros(1, 1, dtype=torch.float64)
    for n in sides:
        angles = (angles[:, None, :, None] + _angles(n, n)[:, None]).flatten(2).flatten(0, 1)
    return angles


def owned(x: Tensor) -> Tensor:
    """A copy of `x` in memory of its own, in order."""
    return x.detach().clone(memory_format=torch.contiguous_format)
