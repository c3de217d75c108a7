"""Orthogonal layers by the Cayley transform.

Trockman and Kolter, Orthogonalizing Convolutional Layers with the Cayley Transform, ICLR 2021.
"""

__all__ = ["CayleyConv1d", "CayleyConv2d", "CayleyConv3d", "CayleyConvTranspose2d", "CayleyLinear"]

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.convolutions import convolve
from orthoconv.linalg import cayley, cayley_linear, is_large, weight_norm
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.fused import cayley_at, cayley_conv2d, cayley_head, cayley_matrices
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.lift import can_lift, lift
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.projection import near_cayley
from orthoconv.nn.sequences import SequenceConv1d
from orthoconv.nn.spectral import SpectralConv2d, Way
from orthoconv.nn.tiles import convolve_tiles, cut_kernel, deviation
from orthoconv.nn.volumes import VolumeConv3d
from orthoconv.nn.weight_norm import Signs, WeightNormed
from orthoconv.planes import COMPLEX, plane
from orthoconv.tracing import is_eager, is_traced


class CayleyConv2d(SpectralConv2d):
    r"""Orthogonal convolution: the Cayley transform of a circular convolution (Algorithm 1).

    Takes the place of ``nn.Conv2d(..., padding="same", padding_mode="circular")``, with its arguments in their
    order, on images of any size. It keeps the norm of its input if ``in_channels * stride**2 <= out_channels``,
    and never increases it. The kernel before the transform is :math:`g V / \|V\|`; after it, as large as the image.

    Arguments are those of `BaseConv2d`, and

        signs: Fixed signs of the input channels, after downsampling, that multiply the transform: None for none,
            "random", or a sequence of 1 and -1. Without them no operator has the eigenvalue -1 (Section 4.1).
        identity: Whether V starts as the identity kernel. That is symmetric, so A = 0, and the layer starts as the
            identity on the first channels, times the signs, where the kernel has a tap at the centre: not if it is even
            and dilated. Otherwise V is random.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> layer = CayleyConv2d(3, 16, 3)
    >>> x = torch.randn(8, 3, 32, 32)
    >>> y = layer(x) - layer(torch.zeros_like(x))
    >>> round((y.norm() / x.norm()).item(), 5)
    1.0
    """

    orthogonalize = staticmethod(cayley)

    def set_up(self, *, signs: Signs = None, identity: bool = False) -> None:
        self.identity = bool(identity)
        super().set_up(signs=signs)

    def start_from(self, kernel: Tensor) -> None:
        self.set_kernel(*near_cayley(kernel, self.dilation, self.groups, self.signs))

    def transform(self, kernel: Tensor, size: Pair) -> Tensor:
        if not self._sums_taps or is_traced():
            return super().transform(kernel, size)
        o, i = kernel.shape[0] // self.groups, kernel.shape[1]
        exact = budget.has_double(kernel.device) if o != i else is_large(torch.linalg.vector_norm(kernel.detach()))
        double = kernel.double() if exact else kernel  # as in `cayley`
        Q = cayley_matrices(double, size, self.dilation, self.groups)
        return Q.to(COMPLEX[kernel.dtype])

    def possible_ways(self, size: Pair, *, adjoint: bool, images: int) -> list[Way]:
        if self._has_only_matrices:
            return ["matrices"]
        forms = self.remembers and self._remembered_bytes(size) <= budget.REMEMBERED_BYTES
        ways: list[Way] = ["matrices", "fused"] if forms else ["fused", "matrices"]
        trains = torch.is_grad_enabled() and any(source.requires_grad for source in self.sources())
        if images <= budget.TILED_IMAGES and not trains and self._tile(size):
            ways = ["tiled", *ways]
        if adjoint or not self._can_lift(size):
            return ways
        return ["lifted", *ways] if self._should_lift(size) else [*ways, "lifted"]

    def convolve_by(self, way: Way, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        if way == "lifted":
            return self._lift(x, bias)
        if way not in ("fused", "tiled"):
            return super().convolve_by(way, x, bias, adjoint=adjoint)
        self.check()
        if way == "tiled":
            t = self._tile(self.geometry.size_of(x.shape))
            D = self._tile_operator(t)
            convolved = partial(convolve_tiles, D=D.mH if adjoint else D, t=t)
        else:
            convolved = partial(
                cayley_conv2d, W=self.kernel, dilation=self.dilation, groups=self.groups, adjoint=adjoint
            )
        if not adjoint:
            return convolved(self._signed(x), bias=bias)
        if bias is not None and self.signs is not None:
            bias = bias * self.signs  # the signs that follow give it its own again
        return self._signed(convolved(x, bias=bias))

    def inner_units(self, size: Pair) -> float:
        units = self._tile_units(size, t) if (t := self._tile(size)) else super().inner_units(size)
        if self.transposed or self.way(size) != "lifted":
            return units
        channels, taps = max(self.kernel_shape[:2]), math.prod(self.geometry.taps)
        spread = 1 + math.sqrt(taps) * (math.sqrt(channels) + abs(self.g.item()))
        return spread * (units + 2 * (taps * channels + 8))  # most of the outputs are convolved in space

    def _lift(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute as many outputs as there are inputs by the transform, and the others in space."""
        n, size, kernel = x.shape[1], (x.shape[-2], x.shape[-1]), self.kernel
        if self.remembers:
            D = self.cached_operator(size)[:, :, :n].mT.contiguous().mT  # in the order of an inverse, for the same bits
            y, x = convolve(plane(size, x.dtype, x.device), x, D), self._signed(x)
        else:
            self.check()
            x = self._signed(x)
            y = cayley_head(x, kernel, self.dilation)
        return lift(y, x, kernel[n:], bias, self.dilation)

    def _can_lift(self, size: Pair) -> bool:
        o, i, *k = self.kernel_shape
        return len(k) == 2 and self.groups == 1 and i < o and can_lift((k[0], k[1]), self.dilation, size)

    def _should_lift(self, size: Pair) -> bool:
        """Whether `_lift` is faster, and as accurate: its rounding error grows with the kernel."""
        o, i, kh, kw = self.kernel_shape
        few = i * kh * kw <= budget.LIFTED_RATIO * o and math.prod(size) > budget.DENSE_PIXELS
        return few and budget.has_cache(self.g.device) and abs(self.g.item()) <= budget.LIFTED_NORM

    def _remembered_bytes(self, size: Pair) -> int:
        """Bytes of the matrices of all frequencies; those of more than the budget are not formed to be remembered."""
        o, i = self.kernel_shape[:2]
        return math.prod(size[:-1]) * (size[-1] // 2 + 1) * o * i * 2 * self.weight.element_size()

    def _tile(self, size: Pair) -> int:
        """Side of the tiles by which images of that inner size may be convolved in eval mode; 0 if they are not."""
        if not self.remembers or len(size) != 2 or self._remembered_bytes(size) <= budget.TILED_BYTES:
            return 0
        fits = (t for t in budget.TILES if t <= min(size) and self._remembered_bytes((t, t)) <= budget.TILED_BYTES)
        t = next(fits, 0)
        if not t or self._has_only_matrices or not is_eager(*self.sources()):
            return 0
        return t if self._cut_units(size, t) <= budget.TILED_UNITS else 0

    def _tile_operator(self, t: int) -> Tensor:
        """Matrices of the cut kernel, without the signs, from memory."""
        return self.remembered(("tile", t), self.sources(), partial(self._cut, t))

    def _cut(self, t: int, V: Tensor, g: Tensor, *_: Tensor) -> Tensor:
        return cut_kernel(self.transform(weight_norm(V, g), (t, t)), t)

    def _cut_units(self, size: Pair, t: int) -> float:
        """By how many units of rounding the cut kernel deviates on images of that size, from memory."""

        def compute(V: Tensor, g: Tensor, *_: Tensor) -> Tensor:
            exact = cayley_at(weight_norm(V, g), size, self.dilation, self.groups)
            return deviation(self._cut(t, V, g), t, exact, size)

        lost = self.remembered_number(("lost", t, size), self.sources(), compute)
        return 2 * lost / torch.finfo(self.weight.dtype).eps

    def _tile_units(self, size: Pair, t: int) -> float:
        """Rounding of tiles, and of the transform, which takes their place for many images.

        A pixel lies in up to nine tiles, so the root of the sum of their squared norms is up to three times that of the
        image, and so is their error.
        """
        largest = float(torch.linalg.matrix_norm(self._tile_operator(t)).max())
        return max(self.spectral_units(size, largest), 3 * self.spectral_units((t, t), largest)) + self._cut_units(
            size, t
        )

    @property
    def _has_only_matrices(self) -> bool:
        """Whether no other way computes the same: for what a subclass has changed, many taps, and large weights."""
        parts = ("matrices", "operator", "orthogonalize", "sources", "transform")
        changed = any(getattr(type(self), part) is not getattr(CayleyConv2d, part) for part in parts)
        return changed or not self._sums_taps or is_large(self.g)

    @property
    def _sums_taps(self) -> bool:
        """Whether the kernel is small enough for (I + A) / 2 to be summed over its taps."""
        return math.prod(self.geometry.taps) <= budget.MOST_TAPS

    def _signed(self, x: Tensor) -> Tensor:
        """Multiply the channels of images by the signs."""
        return x if self.signs is None else x * self.geometry.as_image(self.signs)


class CayleyConvTranspose2d(TransposedConv2d, CayleyConv2d):
    """Adjoint of the `CayleyConv2d` of the same weight from `out_channels` to `in_channels`.

    Takes the place of `nn.ConvTranspose2d`, with its arguments in their order; the image grows by `stride`.

    Arguments are those of `TransposedConv2d`, and `signs` and `identity` as in `CayleyConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> down, up = CayleyConv2d(3, 12, 3, stride=2, bias=False), CayleyConvTranspose2d(12, 3, 3, stride=2, bias=False)
    >>> _ = up.load_state_dict(down.state_dict())
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.dist(up(down(x)), x).item() < 1e-5
    True
    """


class CayleyConv1d(SequenceConv1d, CayleyConv2d):
    """`CayleyConv2d` for sequences, in place of `nn.Conv1d`.

    Arguments are those of `SequenceConv1d`, and `signs` and `identity` as in `CayleyConv2d`.

    Shape:
        (b, in_channels, n) or (in_channels, n), to (b, out_channels, n / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(CayleyConv1d(3, 8, 5, dtype=torch.float64), (3, 16)) < 1e-12
    True
    """


class CayleyConv3d(VolumeConv3d, CayleyConv2d):
    """`CayleyConv2d` for volumes, in place of `nn.Conv3d`.

    Arguments are those of `VolumeConv3d`, and `signs` and `identity` as in `CayleyConv2d`.

    Shape:
        (b, in_channels, d, h, w) or (in_channels, d, h, w), to (b, out_channels, d / stride, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(CayleyConv3d(2, 3, 3, dtype=torch.float64), (2, 4, 3, 2)) < 1e-12
    True
    """

    def start_from(self, kernel: Tensor) -> None:
        if not self.geometry.has_one_tap:
            raise ValueError(
                f"CayleyConv3d starts from kernels of one tap alone (keep_weights=True), got {tuple(kernel.shape)}; "
                f"LOTConv3d starts from any"
            )
        W, signs = near_cayley(kernel[..., 0], groups=self.groups, signs=self.signs)
        self.set_kernel(W[..., None], signs)


class CayleyLinear(WeightNormed, BaseLinear):
    """Orthogonal linear layer: the Cayley transform of g V / |V|, in place of `nn.Linear`.

    It keeps the norm of its input if ``in_features <= out_features``, and never increases it.

    Arguments are those of `BaseLinear`, and `signs`, fixed signs of the inputs; it and `identity` are as in
    `CayleyConv2d`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> import torch
    >>> layer = CayleyLinear(512, 10)
    >>> layer(torch.randn(2, 512)).shape
    torch.Size([2, 10])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def set_up(self, *, signs: Signs = None) -> None:
        self.add_scale(signs, self.in_features)

    def start_from(self, matrix: Tensor) -> None:
        kernel, signs = near_cayley(matrix[..., None, None], signs=self.signs)
        self.set_kernel(kernel[..., 0, 0], signs)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        V, g, *signs = sources
        W = weight_norm(V, g)
        Q = cayley(W.double()).to(W) if is_large(g) else cayley(W)
        return Q * signs[0] if signs else Q

    def apply_matrix(self, x: Tensor) -> Tensor:
        if not self._can_stay_unformed(x):
            return super().apply_matrix(x)
        self.check()
        rows = (x if self.signs is None else x * self.signs).reshape(-1, self.in_features)
        y = cayley_linear(rows, self.weight, self.g).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _can_stay_unformed(self, x: Tensor) -> bool:
        """Whether `cayley_linear` gives the same product as the matrix, as accurately, and the matrix is not kept."""
        excess = self.in_features - self.out_features
        accurate = excess == 0 or excess >= self.out_features  # see `cayley_linear`
        own = self.has_matrix_of(CayleyLinear)
        return accurate and own and not is_large(self.g) and not self.remembers and is_eager(x, *self.sources())


register_method(
    "cayley",
    conv=CayleyConv2d,
    linear=CayleyLinear,
    transposed=CayleyConvTranspose2d,
    conv1d=CayleyConv1d,
    conv3d=CayleyConv3d,
)
