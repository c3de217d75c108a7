"""The base of every convolution that is a linear map: what holds for any operator."""

__all__ = ["BaseConv2d", "TransposedConv2d"]

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv import fourier
from orthoconv.linalg import frobenius_norm, spectral_norm
from orthoconv.nn.arguments import Pair, ints, pair
from orthoconv.nn.geometry import Padding
from orthoconv.nn.image_layer import ImageLayer
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.plain import PlainBlocks, PlainConv2d
from orthoconv.planes import transform_units
from orthoconv.tracing import full_precision, is_eager

_NOT_ORTHOGONAL = 1e-3  # by which the norm of an image may change, if a layer is to have an inverse


class BaseConv2d(ImageLayer):
    """Convolution with the arguments of `torch.nn.Conv2d`, whose operator is computed from parameters; abstract.

    A subclass says how to `convolve` without stride, and what its matrices are.

    Arguments are those of `ImageLayer`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> from orthoconv.nn import CayleyConv2d
    >>> layer = CayleyConv2d(3, 8, 3)
    >>> isinstance(layer, BaseConv2d), layer.singular_values((4, 4)).shape
    (True, torch.Size([4, 4, 3]))
    """

    @abstractmethod
    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """Convolve (b, c, h, w) with the operator, without stride, or with its adjoint; then add the bias, if any."""

    def convolve_strided(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """`convolve` between what stands around it: downsampling, padding to the torus, cropping."""
        inner = partial(self.convolve, bias=self.geometry.inner_bias(bias, adjoint=adjoint), adjoint=adjoint)
        return self.geometry.around(x, inner, adjoint=adjoint)

    @abstractmethod
    def one_tap(self, size: Pair) -> Tensor:
        """Matrix (o, i / groups) of an operator with one tap, for inner images of that size."""

    @abstractmethod
    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        """Matrices (g, f, o, i) of the layer for input images of that size; in float64 if `double`.

        The operator is that of the layer's own precision all the same. With padding by zeros it is the operator on the
        larger torus, whose norm the layer does not exceed.
        """

    @abstractmethod
    def inner_units(self, size: Pair) -> float:
        """`rounding_units` of the inner convolution on a torus of that size, with more than one tap."""

    @abstractmethod
    def exported_inner(self, size: Pair) -> nn.Module:
        """The inner convolution, or its adjoint if the layer is transposed, as a plain module without bias."""

    def inner_in_double(self, size: Pair) -> Callable[[Tensor], Tensor]:
        """The inner convolution, or its adjoint if the layer is transposed, in float64, for images of that size."""
        D = self.spectrum(size, double=True).detach()
        return partial(self.convolve_by_spectrum, D=D.mH if self.transposed else D)

    def convolve_by_spectrum(self, x: Tensor, D: Tensor) -> Tensor:
        """Convolve images of the torus by matrices D (g, f, o, i), in any precision."""
        return fourier.spectral_conv2d(x, D)

    @property
    def promise(self) -> Guarantee | None:
        cropped = self.geometry.is_cropped and self.guarantee is not None
        return "nonexpansive" if cropped else self.guarantee

    def lipschitz(self, shape: Sequence[int]) -> float:
        return spectral_norm(
            self.spectrum(self.geometry.size_of(shape), double=True)
        )  # groups are blocks: their maximum

    def singular_values(self, size: int | Sequence[int]) -> Tensor:
        """All singular values (h, w, r) of the layer for input images of that size, by frequency.

        They are those of the operator in the layer's own precision, found in float64.
        """
        if self.geometry.is_cropped:
            raise ValueError(f"singular values by frequency are those of a circular convolution, got {self}")
        size = pair("size", size)
        return fourier.spectral_singular_values(
            self.spectrum(size, double=True).detach(), self.geometry.inner_size(size)
        )

    def singular_values_for(self, shape: Sequence[int]) -> Tensor | None:
        return None if self.geometry.is_cropped else self.singular_values(self.geometry.size_of(shape))

    def rounding_units(self, shape: Sequence[int]) -> float:
        size = self.geometry.inner_size(self.geometry.size_of(shape))
        if self.geometry.has_one_tap:
            return (max(self.kernel_shape[:2]) + 1) * frobenius_norm(self.one_tap(size))
        return self.inner_units(size)

    def spectral_units(self, size: Pair, largest: float) -> float:
        """Rounding of two Fourier transforms and of products with matrices of norms up to `largest` between them."""
        channels, taps = max(self.kernel_shape[:2]), math.prod(self.geometry.taps)
        return 2 * transform_units(size) * max(1.0, largest) + (2 * channels + taps + 4) * math.sqrt(2) * largest

    def in_double(self) -> nn.Module:
        return _InDouble(self)

    def exported(self, shape: Sequence[int]) -> nn.Module:
        size, bias = self.geometry.size_of(shape), None if self.bias is None else self.bias.detach().clone()
        if self.geometry.has_one_tap:
            return PlainBlocks(self.geometry, self.one_tap(self.geometry.inner_size(size)), bias)
        return PlainConv2d(self.geometry, size, self.exported_inner(size), bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._map(x, self.bias, adjoint=self.transposed)

    def inverse(self, y: Tensor) -> Tensor:
        """Return the x for which an orthogonal layer returns `y`: the inverse of an isometry is its adjoint.

        With more outputs than inputs it is the left inverse: `y` is projected on the range of the layer. Weights of
        lower rank may make a layer of some methods, such as BCOP, lose inputs: that is an error. It is looked for with
        one random image, except where torch traces or transforms.
        """
        if reason := self._why_no_inverse():
            raise ValueError(
                f"{type(self).__name__} {self.in_channels} -> {self.out_channels} with stride {self.stride} has no "
                f"inverse: it {reason}"
            )
        self.check_input(y, self.out_channels, adjoint=not self.transposed)
        self._require_isometry(y)
        y = y if self.bias is None else y - self.geometry.as_image(self.bias)
        return self._map(y, None, adjoint=not self.transposed)

    def _why_no_inverse(self) -> str | None:
        """Return why a layer of this class and geometry has no inverse, or None if it has one."""
        i, o = self.geometry.channels
        if i > o and self.promise == "orthogonal":
            return f"maps {i} channels to {o}"
        if self.geometry.is_cropped and self.guarantee == "orthogonal":
            return f"is not orthogonal, since padding_mode={self.padding_mode!r} crops what crosses the border"
        return None if self.promise == "orthogonal" else "is not orthogonal"

    @torch.no_grad()
    def _require_isometry(self, y: Tensor) -> None:
        """Raise an error if the layer does not keep the norm of a random image of the size that it makes `y` from."""
        if not is_eager(y, *self.sources()):
            return
        sides = zip(y.shape[-len(self.stride) :], self.stride, strict=True)
        size = [n // s if self.transposed else n * s for n, s in sides]
        source = torch.Generator().manual_seed(0)
        probe = torch.randn(1, self.in_channels, *size, generator=source, dtype=torch.float64).to(y)
        ratio = float(self._map(probe, None, adjoint=self.transposed).norm() / probe.norm())
        if not abs(ratio - 1) <= _NOT_ORTHOGONAL:
            raise ValueError(
                f"{type(self).__name__} has no inverse with these weights: it multiplies the norm of a random image by "
                f"{ratio:.4g}. Do they have full rank?"
            )

    def _map(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """Apply the convolution that this layer is, or transposes; or its adjoint. Then add the bias."""
        channels = self.in_channels if adjoint == self.transposed else self.out_channels
        batch = self.check_input(x, channels, adjoint=adjoint)
        with full_precision(batch):
            if self.geometry.has_one_tap:
                Q = self.one_tap(self.geometry.divide(self.geometry.size_of(batch.shape), adjoint=adjoint))
                y = self.geometry.apply_blocks(batch, Q, bias, adjoint=adjoint)
            else:
                y = self.convolve_strided(batch, bias, adjoint=adjoint)
        return self.like_input(y, x)


class TransposedConv2d(BaseConv2d):
    """Adjoint of a convolution from `out_channels` to `in_channels`, in place of `nn.ConvTranspose2d`; abstract.

    Put it before the class of the convolution: ``class MyConvTranspose2d(TransposedConv2d, MyConv2d)``.

    Arguments are those of `BaseConv2d`, in the order of `nn.ConvTranspose2d`; the stride multiplies the image. And

        output_padding: What makes nn.ConvTranspose2d multiply each side by the stride; 0 with padding="same".

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> from orthoconv.nn import CayleyConvTranspose2d
    >>> layer = CayleyConvTranspose2d(12, 3, 2, stride=2)
    >>> isinstance(layer, TransposedConv2d), layer(torch.zeros(1, 12, 4, 4)).shape
    (True, torch.Size([1, 3, 8, 8]))
    """

    replaces = nn.ConvTranspose2d
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "same",
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Sequence[int] = 1,
        padding_mode: str = "circular",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype, **options,
        )  # fmt: skip
        self.output_padding = self._check_output_padding(output_padding)

    def _check_output_padding(self, value: int | Sequence[int]) -> Pair:
        expected = (0, 0)
        if self.padding != "same":
            axes = zip(self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
            rows, columns = (s - 1 - d * (k - 1) + 2 * p for k, s, p, d in axes)
            expected = (rows, columns)
        if ints(value) != expected:
            raise ValueError(
                f"output_padding must be {expected} with kernel_size={self.kernel_size}, stride={self.stride}, "
                f"padding={self.padding!r}, dilation={self.dilation}; got {value!r}"
            )
        return expected


class _InDouble(nn.Module):
    """A convolution as the linear map of its operator, computed in float64; it is not trained."""

    def __init__(self, layer: BaseConv2d) -> None:
        super().__init__()
        self._layer = (layer,)  # not a submodule: it keeps its precision
        self._inner: dict[Pair, Callable[[Tensor], Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._layer
        size = layer.geometry.size_of(x.shape)
        if size not in self._inner:
            self._inner[size] = layer.inner_in_double(size)
        single = x.ndim == len(size) + 1
        images = x[None] if single else x
        y = layer.geometry.around(images, self._inner[size], adjoint=layer.transposed)
        y = y if layer.bias is None else y + layer.geometry.as_image(layer.bias.detach().double())
        return y[0] if single else y
