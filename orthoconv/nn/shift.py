"""Convolutions made of two matrices with shifts of channels between them, as in LipNeXt (arXiv 2601.18513, 2026)."""

__all__ = ["ShiftConv2d", "ShiftConvTranspose2d"]

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import budget, fourier
from orthoconv.linalg import cayley, frobenius_norm
from orthoconv.nn.arguments import Pair, pair
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.kernel import KernelConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.methods import register_method
from orthoconv.nn.plain import PlainConv2d, owned


class ShiftConv2d(KernelConv2d):
    r"""Orthogonal convolution: channels are mixed, some of them shifted by a pixel or more, and mixed again.

    .. math:: y = M R^T S(R (x + p)) + b

    With c the larger number of channels, after downsampling and in each group, R (c, c) and M (o, c) are Cayley
    transforms of `mixer` and `weight`. S shifts channels circularly, so it is a permutation. The i inputs are the first
    of the c channels; the other channels are zero. With no more inputs than outputs, M is square, M R^T S R is
    orthogonal, and the layer is an isometry. With more inputs, M has orthonormal rows, and the layer never increases
    norms: its adjoint is an isometry. Its kernel is a cross of kh + kw - 1 taps.
    For one tap there is nothing to shift, and the layer is M alone. With few channels, the layer convolves by its
    kernel, which is faster there. With many, it multiplies by the two matrices.

    Arguments are those of `BaseConv2d`, and

        moved: Share of the c channels that S shifts, from 0 to 1. They are shared equally among the offsets along both
            axes: for k = 3, one pixel up, down, left and right.
        position: Size (h, w) of the input images, to add the learned image p to each channel; None for no p, and
            images of any size.
        identity: Whether R and M start as the identity, so that the layer starts as S.

    Attributes: `weight` (groups, o, c); `mixer` (groups, c, c), or None for one tap, whose `weight` is (groups, o, i);
    `position` (h, w) or None; `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(ShiftConv2d(4, 8, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"
    weight: nn.Parameter
    mixer: nn.Parameter | None
    position: nn.Parameter | None

    def set_up(self, *, moved: float = 0.5, position: Sequence[int] | None = None, identity: bool = False) -> None:
        if isinstance(moved, bool) or not isinstance(moved, int | float) or not 0 <= moved <= 1:
            raise ValueError(f"moved must be a number from 0 to 1, got {moved!r}")
        self.moved, self.identity = float(moved), bool(identity)
        o, i = self.kernel_shape[0] // self.groups, self.kernel_shape[1]
        c = i if self.geometry.has_one_tap else max(o, i)
        self.weight = self.new_parameter(self.groups, o, c)
        mixer = None if self.geometry.has_one_tap else self.new_parameter(self.groups, c, c)
        self.register_parameter("mixer", mixer)
        image = None if position is None else self.new_parameter(*pair("position", position))
        self.register_parameter("position", image)

    def reset_parameters(self) -> None:
        """Draw matrices at random, or make them zero, so that R and M are the identity; p starts as zero."""
        for matrix in self.sources():
            nn.init.normal_(matrix, std=0.0 if self.identity else matrix.shape[-1] ** -0.5)
        if self.position is not None:
            nn.init.zeros_(self.position)
        self.reset_bias()

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.mixer is None else (self.weight, self.mixer)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        """Matrices (groups, i + o, c): the first i columns of R, and M R^T; for one tap, M (groups, o, i)."""
        M = cayley(sources[0])
        if len(sources) == 1:
            return M
        R = cayley(sources[1])
        return torch.cat((R[..., : self.kernel_shape[1]].mT, M @ R.mT), 1)

    def inner_kernel(self, operator: Tensor) -> Tensor:
        if self.mixer is None:
            return operator.flatten(0, 1)[..., None, None]
        (first, last), (kh, kw) = self._factors(operator), self.geometry.taps
        shares = zip(first.split(self._counts, 1), last.split(self._counts, 2), strict=True)
        products = torch.stack([Q @ P for P, Q in shares])  # (tap of the cross, g, o, i)
        index = torch.tensor([row * kw + column for row, column in self._cross], device=operator.device)
        kernel = products.new_zeros(kh * kw, *products.shape[1:]).index_copy(0, index, products)
        inner: Tensor = kernel.permute(1, 2, 3, 0).unflatten(3, (kh, kw)).flatten(0, 1)
        return inner

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        if min(self.kernel_shape[0] // self.groups, self.kernel_shape[1]) < budget.SHIFTED_CHANNELS:
            return super().convolve(x, bias, adjoint=adjoint)
        first, last = self._factors(self.cached_operator())
        first, last = (last.mT, first.mT) if adjoint else (first, last)
        z = F.conv2d(x, first.flatten(0, 1)[..., None, None], groups=self.groups)
        z = self.geometry.on_torus(z, partial(self._shift, adjoint=adjoint))
        return F.conv2d(z, last.flatten(0, 1)[..., None, None], bias, groups=self.groups)

    def inner_units(self, size: Pair) -> float:
        """Return the larger figure, that of the kernel or that of the two matrices."""
        first, last = map(frobenius_norm, self._factors(self.cached_operator(size)))
        return max(super().inner_units(size), 1.01 * (max(self.kernel_shape[:2]) + 1) * (first + last))

    def forward(self, x: Tensor) -> Tensor:
        if self.position is None:
            return super().forward(x)
        if x.shape[-2:] != self.position.shape:
            raise ValueError(
                f"this {type(self).__name__} takes images of its position={tuple(self.position.shape)}, "
                f"got {tuple(x.shape)}"
            )
        return self._map(x, None, adjoint=self.transposed) + self._constant()

    def inverse(self, y: Tensor) -> Tensor:
        if self.position is None:
            return super().inverse(y)
        constant = self._constant()
        if y.shape[-2:] != constant.shape[-2:]:
            raise ValueError(
                f"the inverse of a {type(self).__name__} with position={tuple(self.position.shape)} takes images of "
                f"{tuple(constant.shape[-2:])}, got {tuple(y.shape)}"
            )
        bias = 0 if self.bias is None else self.bias[:, None, None]
        return super().inverse(y - constant + bias)

    def in_double(self) -> nn.Module:
        if self.position is None:
            return super().in_double()
        constant = self._constant().detach().double()
        constant = constant if self.bias is None else constant - self.bias.detach().double()[:, None, None]
        return nn.Sequential(super().in_double(), _Add(constant))

    def exported(self, shape: Sequence[int]) -> nn.Module:
        if self.position is None:
            return super().exported(shape)
        size = shape[-2], shape[-1]
        return nn.Sequential(PlainConv2d(self.geometry, size, self.exported_inner(size), None), _Add(self._constant()))

    def extra_repr(self) -> str:
        position = "" if self.position is None else f", position={tuple(self.position.shape)}"
        return f"{super().extra_repr()}, moved={self.moved:g}{position}"

    def _constant(self) -> Tensor:
        """What the layer makes of the image p, and the bias: (o, h, w), one image for all inputs."""
        assert self.position is not None
        p = self.position.expand(self.in_channels, -1, -1)
        return self._map(p, self.bias, adjoint=self.transposed)

    def _factors(self, operator: Tensor) -> tuple[Tensor, Tensor]:
        """Matrices before the shift (g, c, i), and after it (g, o, c)."""
        i = self.kernel_shape[1]
        return operator[:, :i].mT, operator[:, i:]

    @property
    def _cross(self) -> list[Pair]:
        """Taps to which channels are moved: up, down, left, right, and last the centre."""
        (kh, kw), (row, column) = self.geometry.taps, ((k - 1) // 2 for k in self.geometry.taps)
        down = [(p, column) for p in range(kh) if p != row]
        return [*down, *((row, q) for q in range(kw) if q != column), (row, column)]

    @property
    def _counts(self) -> list[int]:
        """Channels of a group at each tap of the cross."""
        c, n = max(self.kernel_shape[0] // self.groups, self.kernel_shape[1]), len(self._cross) - 1
        moved = math.ceil(self.moved * c)
        ends = [-(-moved * k // n) for k in range(n + 1)]
        return [*(b - a for a, b in itertools.pairwise(ends)), c - moved]

    def _shift(self, z: Tensor, *, adjoint: bool) -> Tensor:
        """Let each channel of (b, g c, h, w) read the pixels at the offset of its tap; or the adjoint."""
        rows, columns = (fourier.offsets(k, d).tolist() for k, d in zip(self.geometry.taps, self.dilation, strict=True))
        sign = 1 if adjoint else -1
        parts = z.unflatten(1, (self.groups, -1)).split(self._counts, 2)
        offsets = [(sign * rows[p], sign * columns[q]) for p, q in self._cross]
        moved = [part if by == (0, 0) else part.roll(by, (-2, -1)) for part, by in zip(parts, offsets, strict=True)]
        return torch.cat(moved, 2).flatten(1, 2)


class ShiftConvTranspose2d(TransposedConv2d, ShiftConv2d):
    """Adjoint of the `ShiftConv2d` of the same parameters from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and those of `ShiftConv2d`; `position` is added to the input as there.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> ShiftConvTranspose2d(8, 2, 6, stride=2)(torch.randn(1, 8, 3, 5)).shape
    torch.Size([1, 2, 6, 10])
    """


class _Add(nn.Module):
    """Add a fixed image."""

    image: Tensor

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.register_buffer("image", owned(image))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.image


register_method("shift", conv=ShiftConv2d, linear="cayley", transposed=ShiftConvTranspose2d)
