"""Adaptive orthogonal convolutions (AOC): BCOP kernels whose stride is that of nn.Conv2d.

Boissin et al., An Adaptive Orthogonal Convolution Scheme for Efficient and Flexible CNN Architectures, ICML 2025.
"""

__all__ = ["AOCConv2d", "AOCConvTranspose2d"]

import math
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.linalg import polar
from orthoconv.nn.arguments import Pair
from orthoconv.nn.bcop import block_product
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.geometry import Geometry, NativeGeometry
from orthoconv.nn.identity import half_projectors_, rectangular_identity
from orthoconv.nn.kernel import KernelConv2d, wrap
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.methods import register_method


class AOCConv2d(KernelConv2d):
    r"""Orthogonal convolution with a kernel of exactly k x k taps at any stride s, applied by one strided convolution.

    .. math:: K = R * F_1 * \dots * F_n

    R is an (o, c s s) orthogonal matrix reshaped to s x s taps: with stride s its patches do not overlap, so it is
    (semi-)orthogonal. The F are the two-tap filters of `BCOPConv2d` on c channels, k - s down and k - s across, which
    are orthogonal at stride 1. The inputs are the first i of the ``c = max(i, o // (s s))`` channels. K is an isometry
    if ``i s s <= o``, and the adjoint of one otherwise. Orthogonal matrices are polar factors: the scale of parameters
    does not matter, and where `weight` has lower rank, the layer is still nonexpansive.

    Unlike the other layers, this one reads pixels as nn.Conv2d does, dilation and an int `padding` included: with
    padding p it is ``nn.Conv2d(..., stride, padding=p, padding_mode="circular")`` with the weight `kernel`. With "same"
    the kernel is centred on the block of s x s pixels, up to half a pixel.

    Arguments are those of `BaseConv2d`, and

        identity: Whether the layer starts as the identity on blocks of s x s pixels. It does for odd k - s + 1 and even
            c; otherwise some channels start shifted by a pixel.

    The kernel must be at least as large as the stride; stride and dilation must have no common divisor, otherwise
    pixels stay unread.

    Attributes: `weight`, before it becomes R, (groups, o, c s s); `projectors`, before they become the N of the
    filters, (groups, n, c, c // 2), or None for n = 0; `bias`. With stride 1 and i < o, the kernel is that from o to i,
    transposed.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> layer = AOCConv2d(2, 8, 4, stride=2, dtype=torch.float64)
    >>> layer.kernel.shape, orthogonality_error(layer, (2, 6, 8)) < 1e-12
    (torch.Size([8, 2, 4, 4]), True)
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"
    geometry_type: ClassVar[type[Geometry]] = NativeGeometry
    weight: nn.Parameter
    projectors: nn.Parameter | None

    def set_up(self, *, identity: bool = False) -> None:
        self.identity = bool(identity)
        o, _, c = self._channels()
        n = sum(k - s for k, s in zip(self.kernel_size, self.stride, strict=True))
        self.weight = self.new_parameter(self.groups, o, c * math.prod(self.stride))
        several = self.new_parameter(self.groups, n, c, c // 2) if n else None
        self.register_parameter("projectors", several)

    def reset_parameters(self) -> None:
        """Initialise orthogonal matrices, or those of the identity."""
        for matrix in (*self.weight, *(() if self.projectors is None else self.projectors.flatten(0, 1))):
            if matrix.numel():
                nn.init.orthogonal_(matrix)
        if self.identity:
            self._start_as_identity()
        self.reset_bias()

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        m, n = self.weight.shape[1:]
        T = rectangular_identity(n, m, self.weight).mT if self._swaps else rectangular_identity(m, n, self.weight)
        self.weight.copy_(T)
        if self.projectors is not None:
            half_projectors_(self.projectors, self.kernel_size[0] - self.stride[0])

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.projectors is None else (self.weight, self.projectors)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        """Kernel (o, i / groups, kh, kw) of the strided convolution."""
        weight, *projectors = sources
        _, i, c = self._channels()
        K = polar(weight).unflatten(2, (c, *self.stride)).permute(0, 3, 4, 1, 2)  # (g, sh, sw, o, c)
        N = polar(projectors[0]).unbind(1) if projectors else ()
        down = self.kernel_size[0] - self.stride[0]
        K = block_product(K, N[:down], N[down:])[..., :i].permute(0, 3, 4, 1, 2)  # (g, o, i, kh, kw)
        return (K.transpose(1, 2) if self._swaps else K).flatten(0, 1)

    @property
    def kernel(self) -> Tensor:
        """The kernel (o, i / groups, kh, kw) that is applied with the stride."""
        return self.operator((1, 1), *self.sources())

    def inner_kernel(self, operator: Tensor) -> Tensor:
        return self._native.inner_kernel(operator)

    def convolve_strided(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        if self.stride == (1, 1):
            return super().convolve_strided(x, bias, adjoint=adjoint)
        K, (first, last), before = self.cached_operator(), self._native.reach, self._native.before
        if not adjoint:
            spans = (d * (k - 1) - s + 1 for k, s, d in zip(self.kernel_size, self.stride, self.dilation, strict=True))
            bottom, right = (max(0, span - b) for span, b in zip(spans, before, strict=True))
            x = self._pad(x, before, (bottom, right))
            return F.conv2d(x, K, bias, self.stride, 0, self.dilation, self.groups)
        (h, w), (sh, sw) = x.shape[-2:], self.stride
        x = self._pad(x, last, first)
        y = F.conv_transpose2d(x, K, bias, self.stride, 0, 0, self.groups, self.dilation)
        return y.narrow(-2, sh * last[0] + before[0], sh * h).narrow(-1, sw * last[1] + before[1], sw * w)

    def _pad(self, x: Tensor, before: Pair, after: Pair) -> Tensor:
        if self.padding_mode == "circular":
            return wrap(x, before, after)
        return F.pad(x, (before[1], after[1], before[0], after[0]))

    @property
    def _native(self) -> NativeGeometry:
        return cast(NativeGeometry, self.geometry)

    @property
    def _swaps(self) -> bool:
        """Whether the kernel is made from outputs to inputs, whose matrix R is smaller."""
        o, i, *_ = self.kernel_shape
        return self.stride == (1, 1) and o // self.groups > i

    def _channels(self) -> tuple[int, int, int]:
        """Outputs, inputs and channels between R and the filters, in a group."""
        block = math.prod(self.stride)
        o, i = self.kernel_shape[0] // self.groups, self.kernel_shape[1] // block
        o, i = (i, o) if self._swaps else (o, i)
        return o, i, max(i, o // block)


class AOCConvTranspose2d(TransposedConv2d, AOCConv2d):
    """Adjoint of the `AOCConv2d` of the same parameters from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `identity` as in `AOCConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> down, up = AOCConv2d(3, 12, 4, stride=2, bias=False), AOCConvTranspose2d(12, 3, 4, stride=2, bias=False)
    >>> _ = up.load_state_dict(down.state_dict())
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.dist(up(down(x)), x).item() < 1e-4
    True
    """


register_method("aoc", conv=AOCConv2d, linear="polar", transposed=AOCConvTranspose2d)
