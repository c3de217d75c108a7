"""Orthogonal convolutions by the Cayley transform.

Trockman and Kolter, Orthogonalizing Convolutional Layers with the Cayley Transform, ICLR 2021.
"""

__all__ = ["CayleyConv2d", "CayleyConvTranspose2d"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv.linalg import cayley
from orthoconv.nn.base import Padding, ints
from orthoconv.nn.fused import cayley_conv2d, cayley_head, cayley_matrices
from orthoconv.nn.lift import can_lift, lift
from orthoconv.nn.memory import Pair
from orthoconv.nn.spectral import SpectralConv2d
from orthoconv.nn.weight_norm import Signs
from orthoconv.planes import COMPLEX, FastPlane, convolve, plane
from orthoconv.tracing import is_eager

_MOST_TAPS = 49  # of a kernel whose (I + A) / 2 is summed over taps
_LIFTED = 1.2  # times the outputs: as many entries may a patch have, for the convolution in space to be faster
_MODERATE = 32.0  # norm of a kernel whose convolution in float32 is accurate enough


class _Cayley(SpectralConv2d):
    """What `CayleyConv2d` and its transpose share."""

    orthogonalize = staticmethod(cayley)

    def transform(self, kernel: Tensor, size: Pair) -> Tensor:
        if not self._has_few_taps or torch.compiler.is_compiling():
            return super().transform(kernel, size)
        o, i = kernel.shape[0] // self.groups, kernel.shape[1]
        double = kernel.double() if o != i and kernel.device.type != "mps" else kernel  # as in `cayley`
        Q = cayley_matrices(double, size, self.dilation, self.groups)
        return Q.to(COMPLEX[kernel.dtype])

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        size, used = (x.shape[-2], x.shape[-1]), (x, *self.sources(), *(() if bias is None else (bias,)))
        if len(x) == 0 or not is_eager(*used) or not self._has_few_taps or self._is_constant(size):
            return super().convolve(x, bias, adjoint=adjoint)
        if not adjoint and self._lifts(size):
            return self._lift(x, bias)
        if self.remembers:
            return super().convolve(x, bias, adjoint=adjoint)
        self.check()
        x = x if adjoint else self._signed(x)
        y = cayley_conv2d(x, self.kernel, bias, self.dilation, self.groups, adjoint=adjoint)
        return self._signed(y) if adjoint else y

    def _lift(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer with few inputs: as many outputs by the transform, the others in space."""
        n, size, kernel = x.shape[1], (x.shape[-2], x.shape[-1]), self.kernel
        if self.remembers:
            D = self.recall(size)[:, :, :n].mT.contiguous().mT  # in the order of an inverse, for the same bits
            y, x = convolve(plane(size, x.dtype, x.device), x, D), self._signed(x)
        else:
            self.check()
            x = self._signed(x)
            y = cayley_head(x, kernel, self.dilation)
        return lift(y, x, kernel[n:], bias, self.dilation)

    def _lifts(self, size: Pair) -> bool:
        """Whether `_lift` is faster, and as accurate: its rounding error grows with the kernel."""
        o, i, kh, kw = self.kernel_shape
        few = self.groups == 1 and i < o and i * kh * kw <= _LIFTED * o
        few = few and isinstance(plane(size, self.g.dtype, self.g.device), FastPlane)
        if not few or not can_lift((kh, kw), self.dilation, size) or self.g.device.type != "cpu":
            return False
        return abs(self.g.item()) <= _MODERATE

    def _signed(self, x: Tensor) -> Tensor:
        return x if self.signs is None else x * self.signs[:, None, None]

    @property
    def _has_few_taps(self) -> bool:
        return math.prod(self.kernel_shape[2:]) <= _MOST_TAPS


class CayleyConv2d(_Cayley):
    r"""Orthogonal convolution: the Cayley transform of a circular convolution (Algorithm 1).

    Takes the place of ``nn.Conv2d(..., padding="same", padding_mode="circular")``, with its arguments in their
    order, on images of any size. It keeps the norm of its input if ``in_channels * stride**2 <= out_channels``,
    and never increases it. The kernel before the transform is :math:`g V / \|V\|`.

    Arguments:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Taps of the kernel before the transform, an int or a pair; after it, the whole image.
        stride: Int or pair that divides the image. Blocks of pixels become channels, and ``max(1, k // stride)``
            taps mix them.
        padding: "same", or the ints with which nn.Conv2d returns an image of the same size.
        dilation: Distance of the taps, an int or a pair.
        groups: Number of blocks of channels, each orthogonal by itself.
        bias: Whether to add a learnable bias.
        padding_mode: "circular", or "zeros": the image is a part of a torus with room for the kernel, zero elsewhere,
            and the result is cropped. That never increases norms, but keeps them no longer, and has no inverse.
        signs: Fixed signs of the input channels, after downsampling, that multiply the transform: None for none,
            "random", or a sequence of 1 and -1. Without them no operator has the eigenvalue -1 (Section 4.1).

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> layer = CayleyConv2d(3, 16, 3)
    >>> x = torch.randn(8, 3, 32, 32)
    >>> y = layer(x) - layer(torch.zeros_like(x))
    >>> round((y.norm() / x.norm()).item(), 5)
    1.0
    """


class CayleyConvTranspose2d(_Cayley):
    """Adjoint of the `CayleyConv2d` of the same weight from `out_channels` to `in_channels`.

    Takes the place of `nn.ConvTranspose2d`, with its arguments in their order; the image grows by `stride`.

    >>> down, up = CayleyConv2d(3, 12, 3, stride=2, bias=False), CayleyConvTranspose2d(12, 3, 3, stride=2, bias=False)
    >>> _ = up.load_state_dict(down.state_dict())
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.dist(up(down(x)), x).item() < 1e-5
    True
    """

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
        *,
        signs: Signs = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype, signs=signs,
        )  # fmt: skip
        self.output_padding = self._check_output_padding(output_padding)

    def _check_output_padding(self, value: int | Sequence[int]) -> Pair:
        """Accept what makes nn.ConvTranspose2d multiply each side by the stride; nothing with "same"."""
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
