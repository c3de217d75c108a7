"""Skew orthogonal convolutions (SOC): the exponential of a skew convolution, and of a skew matrix.

Singla and Feizi, Skew Orthogonal Convolutions, ICML 2021.
"""

__all__ = [
    "ExpLinear",
    "SOCConv1d",
    "SOCConv2d",
    "SOCConv3d",
    "SOCConvTranspose2d",
    "TaylorSOCConv2d",
    "TaylorSOCConvTranspose2d",
]

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.convolutions import convolve
from orthoconv.linalg import exponential_terms, frobenius_norm, norm_bound, skew_exponential, spectral_norm
from orthoconv.nn.arguments import Pair, positive_int
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.geometry import Geometry
from orthoconv.nn.kernel import KernelConv2d, kernel_units, same_conv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.plain import PlainSpectrum, owned
from orthoconv.nn.sequences import SequenceConv1d
from orthoconv.nn.spectral import UnscaledConv2d, matrices_on
from orthoconv.nn.volumes import VolumeConv3d
from orthoconv.planes import Plane, plane
from orthoconv.tracing import is_eager


class SOCConv2d(UnscaledConv2d):
    r"""Orthogonal convolution: the exponential of a skew convolution.

    .. math:: \exp\big(\tfrac12 (W - W^*)\big)

    at each frequency. It is the exponential itself, up to rounding, and not the first terms of its series, so no weight
    is too large. With c the larger number of channels, after downsampling and in each group, the layer has the first
    rows and columns of the exponential. With no more inputs than outputs, these are whole columns, and the layer is an
    isometry. With more inputs, these are whole rows, and the layer never increases norms.

    Arguments are those of `BaseConv2d`, and

        identity: Whether the weight starts as zero and the exponential as the identity; otherwise it is random.

    Attributes: `weight`, the kernel of W, (groups c, c, kh, kw); `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(SOCConv2d(4, 8, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    def set_up(self, *, identity: bool = False) -> None:
        o, i, *taps = self.kernel_shape
        c = max(o // self.groups, i)
        self.identity = bool(identity)
        self.weight = self.new_parameter(self.groups * c, c, *taps)

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does for a convolution, or as zero."""
        super().reset_parameters()
        if self.identity:
            nn.init.zeros_(self.weight)

    orthogonalize = staticmethod(skew_exponential)

    def matrices(self, kernel: Tensor, size: Pair) -> Tensor:
        o, i = self.kernel_shape[0] // self.groups, self.kernel_shape[1]
        return super().matrices(kernel, size)[..., :o, :i]


class SOCConvTranspose2d(TransposedConv2d, SOCConv2d):
    """Adjoint of the `SOCConv2d` of the same weight from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `identity` as in `SOCConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> SOCConvTranspose2d(12, 3, 3, stride=2)(torch.randn(1, 12, 4, 4)).shape
    torch.Size([1, 3, 8, 8])
    """


class SOCConv1d(SequenceConv1d, SOCConv2d):
    """`SOCConv2d` for sequences, in place of `nn.Conv1d`.

    Arguments are those of `SequenceConv1d`, and `identity` as in `SOCConv2d`.

    Shape:
        (b, in_channels, n) or (in_channels, n), to (b, out_channels, n / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(SOCConv1d(3, 8, 5, dtype=torch.float64), (3, 16)) < 1e-12
    True
    """


class SOCConv3d(VolumeConv3d, SOCConv2d):
    """`SOCConv2d` for volumes, in place of `nn.Conv3d`.

    Arguments are those of `VolumeConv3d`, and `identity` as in `SOCConv2d`.

    Shape:
        (b, in_channels, d, h, w) or (in_channels, d, h, w), to (b, out_channels, d / stride, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(SOCConv3d(2, 3, 3, dtype=torch.float64), (2, 4, 3, 2)) < 1e-12
    True
    """


class TaylorSOCConv2d(KernelConv2d):
    r"""Nonexpansive convolution: the first terms of the exponential of a skew convolution, in space.

    .. math:: \Big(1 + \frac{1}{(m+1)!}\Big)^{-1} \sum_{k=0}^m \frac{A^k}{k!}, \qquad A = \frac{W - W^*}{2 \max(s, 1)}

    This is the published form: each term is one more convolution with a small kernel. Forming the same polynomial of A
    at each frequency takes fewer operations for large circular batches: with 3 x 3 taps, for half as many images as
    channels or more. The layer then does that.

    With ``padding_mode="zeros"``, each of these convolutions pads by zeros, as published. Its matrix is skew, too, so
    nothing is lost at the border: as on circular images, the singular values are 1 up to the rest of the series.
    Orthogonal layers of other methods lose norm there.

    The number s is an upper bound of the norm of (W - W*) / 2 on images of any size: sqrt(kh kw) times the least norm
    of four matrices made of the kernel (Singla and Feizi, Fantastic Four, 2021), each bounded from above
    (`linalg.norm_bound`). Hence \|A\| <= 1, the sum has norm at most 1 + 1 / (m+1)!, and the layer at most 1. Public
    code takes s from a power iteration, which is a lower bound, and leaves out the rest of the series.

    Its singular values are at least 1 - 2 / (m+1)!, which is 3e-10 below 1 for 12 terms. The published code takes 5 or
    6 terms in training and 12 or more afterwards.

    Arguments are those of `BaseConv2d`, and

        terms: Degree m of the polynomial, at least 1; at most 169 where it goes through space.
        identity: Whether the weight starts as zero and the layer as the identity; otherwise it is random.

    Attributes: `weight`, the kernel of W, (groups c, c, kh, kw) with c as in `SOCConv2d`; `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> TaylorSOCConv2d(4, 8, 3).singular_values((5, 6)).max().item() <= 1 + 1e-6
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def set_up(self, *, terms: int = 12, identity: bool = False) -> None:
        o, i, kh, kw = self.kernel_shape
        c = max(o // self.groups, i)
        self.terms, self.identity = positive_int("terms", terms), bool(identity)
        if any(k % 2 == 0 and d > 1 for k, d in zip((kh, kw), self.dilation, strict=True)):
            raise ValueError(
                f"TaylorSOCConv2d takes an odd number of dilated taps, or W* has others than W; got {kh} x {kw} taps "
                f"with dilation={self.dilation}"
            )
        self.weight = self.new_parameter(self.groups * c, c, kh, kw)

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does for a convolution, or as zero."""
        super().reset_parameters()
        if self.identity:
            nn.init.zeros_(self.weight)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        """Kernel of A, (g c, c, kh, kw), with an odd number of taps on each axis."""
        kh, kw = sources[0].shape[2:]
        W = F.pad(sources[0], (1 - kw % 2, 0, 1 - kh % 2, 0)).unflatten(0, (self.groups, -1))  # (g, c, c, kh, kw)
        K = 0.5 * (W - W.transpose(1, 2).flip(-2, -1))
        return torch.cat([part / _scale_of_any_size(part) for part in K])

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        if not self.geometry.is_cropped and self._go_by_frequencies(x):
            p = plane(self.geometry.size_of(x.shape), x.dtype, x.device)
            D = self.cached(("series", *p.size), partial(self._matrices_on, p))
            return convolve(p, x, D.mH if adjoint else D, bias)
        y = _series_in_space(x, self.cached_operator(), self.geometry, self.terms, adjoint=adjoint)
        return y if bias is None else y + bias[:, None, None]

    def _matrices_on(self, p: Plane, *sources: Tensor) -> Tensor:
        """Matrices (f, g, o, i) of the layer on a plane."""
        return self._series(matrices_on(p, self._compute((1, 1), *sources), self.dilation, self.groups))

    def _go_by_frequencies(self, x: Tensor) -> bool:
        """Whether forming the matrices and applying them takes fewer operations than `terms` convolutions.

        Products are complex, and at half of the frequencies.
        """
        b, c, taps = len(x), self.weight.shape[1], math.prod(k | 1 for k in self.weight.shape[2:])
        return is_eager(x, *self.sources()) and self.terms * taps * b > 4 * (b + self.terms * c)

    def one_tap(self, size: Pair) -> Tensor:
        A = self.cached_operator()[:, :, 0, 0].unflatten(0, (self.groups, -1))
        return self._series(A).flatten(0, 1)

    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        """Return the series at each frequency. With padding by zeros, that is another layer: the circular one."""
        return self._series(super().spectrum(size, double=double))

    def inner_units(self, size: Pair) -> float:
        """Return the larger of two: by the series at each frequency, and by convolutions."""
        kernel = self.cached_operator()
        c, norm = kernel.shape[1], math.sqrt(kernel[0, 0].numel()) * frobenius_norm(kernel)  # of A at any frequency
        largest = math.sqrt(min(self.kernel_shape[:2])) + 1  # Frobenius norm of matrices whose norm is at most 1
        in_space = self.terms + 1 + math.e * kernel_units(kernel)
        if self.geometry.is_cropped:
            return in_space
        # A^k / k! has k - 1 products, whose errors add up to 1 in all; products with I in a sum add `norm` at most.
        series = math.sqrt(2) * (c + 2) * norm * (norm + 1) + (self.terms + 2) * (math.sqrt(c) + 2 * norm)
        return max(self.spectral_units(size, largest) + series, in_space)

    def lipschitz(self, shape: Sequence[int]) -> float:
        """With padding by zeros, A has a norm of at most that on the torus, |A|, and the sum 1 + |A|^(m+1) / (m+1)!."""
        if not self.geometry.is_cropped:
            return super().lipschitz(shape)
        A = super().spectrum(self.geometry.size_of(shape), double=True)
        rest: float = spectral_norm(A) ** (self.terms + 1) * (1 / math.factorial(self.terms + 1))
        return (1 + rest) / _largest(self.terms) * (1 + 2**-50)

    def inner_in_double(self, size: Pair) -> Callable[[Tensor], Tensor]:
        return _PlainSeries(self).double() if self.geometry.is_cropped else super().inner_in_double(size)

    def exported_inner(self, size: Pair) -> nn.Module:
        if self.geometry.is_cropped:
            return _PlainSeries(self)
        D = self.spectrum(size)
        return PlainSpectrum(D.mH if self.transposed else D, self.geometry.inner_size(size))

    def _series(self, A: Tensor) -> Tensor:
        """Sum of the series for A (..., c, c), cut to the layer's channels."""
        X = exponential_terms(A, self.terms)
        return X[..., : self.kernel_shape[0] // self.groups, : self.kernel_shape[1]] / _largest(self.terms)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, terms={self.terms}"


def _series_in_space(x: Tensor, kernel: Tensor, geometry: Geometry, terms: int, *, adjoint: bool) -> Tensor:
    """Apply the series to images (b, c, h, w), one convolution by the kernel of A (g c, c, kh, kw) after another."""
    (o, i, *_), c, g, dilation = geometry.kernel_shape, kernel.shape[1], geometry.groups, geometry.inner_dilation
    kernel, o, i = (-kernel, i, o // g) if adjoint else (kernel, o // g, i)
    y = term = F.pad(x.unflatten(-3, (g, i)), (0, 0, 0, 0, 0, c - i)).flatten(-4, -3)
    for k in range(1, terms + 1):
        term = same_conv2d(term, kernel / k, None, dilation, g, zeros=geometry.is_cropped)
        y = y + term
    kept: Tensor = y.unflatten(-3, (g, c))[..., :o, :, :].flatten(-4, -3)
    return kept - kept / (math.factorial(terms + 1) + 1.0)  # over `_largest`; ONNX leaves out a division by nearly 1


def _largest(terms: int) -> float:
    """Bound of the norm of the series for |A| <= 1."""
    return 1 + 1 / math.factorial(terms + 1)


class _PlainSeries(nn.Module):
    """The series of a layer, without stride and bias, by a fixed kernel."""

    kernel: Tensor

    def __init__(self, layer: TaylorSOCConv2d) -> None:
        super().__init__()
        self.geometry, self.terms = layer.geometry, layer.terms
        self.register_buffer("kernel", owned(layer.cached_operator()))

    def forward(self, x: Tensor) -> Tensor:
        return _series_in_space(x, self.kernel, self.geometry, self.terms, adjoint=self.geometry.transposed)


class TaylorSOCConvTranspose2d(TransposedConv2d, TaylorSOCConv2d):
    """Adjoint of the `TaylorSOCConv2d` of the same weight from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `terms` and `identity` as in `TaylorSOCConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> TaylorSOCConvTranspose2d(12, 3, 3, stride=2)(torch.randn(1, 12, 4, 4)).shape
    torch.Size([1, 3, 8, 8])
    """


class ExpLinear(BaseLinear):
    """Orthogonal linear layer: the first rows and columns of the exponential of (W - W*) / 2.

    The exponential has the order of the larger of the features, which makes the layer slow for thousands of them.

    Arguments are those of `nn.Linear`.

    Attributes: `weight`, W, of shape (c, c) with c the larger of the features; `bias`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> import torch
    >>> ExpLinear(32, 10)(torch.randn(2, 32)).shape
    torch.Size([2, 10])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def set_up(self) -> None:
        c = max(self.in_features, self.out_features)
        self.weight = nn.Parameter(self.weight.new_empty(c, c))

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return skew_exponential(sources[0])[: self.out_features, : self.in_features]


def _scale_of_any_size(K: Tensor) -> Tensor:
    """Upper bound of the norm of the convolution by K (o, i, kh, kw), on images of any size; or 1, if that is more.

    The gradient at K = 0 is zero.
    """
    zero = K.detach().abs().amax() == 0
    K = torch.where(zero, torch.ones_like(K), K)
    orders = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 3, 1))
    splits = (1, 2, 2, 3)  # axes of the rows of each matrix
    matrices = (K.permute(order).flatten(n).flatten(0, n - 1) for order, n in zip(orders, splits, strict=True))
    norm = math.sqrt(math.prod(K.shape[2:])) * torch.stack([norm_bound(M) for M in matrices]).amin()
    return torch.where(zero, 1.0, norm.clamp_min(1))


register_method(
    "soc", conv=SOCConv2d, linear="cayley", transposed=SOCConvTranspose2d, conv1d=SOCConv1d, conv3d=SOCConv3d
)
register_method("soc_taylor", conv=TaylorSOCConv2d, linear="cayley", transposed=TaylorSOCConvTranspose2d)
register_method("exp", linear=ExpLinear)
