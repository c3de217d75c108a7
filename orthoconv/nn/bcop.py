"""Block convolution orthogonal parametrisation (BCOP).

Li et al., Preventing Gradient Attenuation in Lipschitz Constrained Convolutional Networks, NeurIPS 2019; after
Xiao et al., Dynamical Isometry and a Mean Field Theory of CNNs, 2018.
"""

__all__ = ["BCOPConv2d", "BCOPConvTranspose2d", "block_product"]

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.linalg import cayley_preimage
from orthoconv.linalg import orthogonalizer as find_orthogonalizer
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.identity import half_projectors_, rectangular_identity
from orthoconv.nn.kernel import KernelConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.methods import register_method


class BCOPConv2d(KernelConv2d):
    """Orthogonal convolution with a kernel of exactly k x k taps, from 2 (k - 1) projections and one matrix.

    The two-tap filter with P and I - P, where P is a symmetric projection, is orthogonal: at each frequency its matrix
    P + z (I - P) is unitary. So is the product of k - 1 such filters down and k - 1 across, with a (semi-)orthogonal
    matrix H at the side with fewer channels. P has rank c // 2, c the larger number of channels, and is N N* for an
    orthogonal N (c, c // 2).

    Arguments are those of `BaseConv2d`, and

        orthogonalizer: What makes H and the N orthogonal: "bjorck", or "cayley" for the paper's CayleyBCOP.
        identity: Whether the layer starts as the identity at the centre tap. It does for odd kernels and even c;
            otherwise some channels start shifted by a pixel.

    Attributes: `weight`, before it becomes H, (groups, min, c); `projectors`, before they become N,
    (groups, kh + kw - 2, c, c // 2), or None for one tap; `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(BCOPConv2d(4, 4, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"
    weight: nn.Parameter
    projectors: nn.Parameter | None

    def set_up(self, *, orthogonalizer: str = "bjorck", identity: bool = False) -> None:
        find_orthogonalizer(orthogonalizer)
        self.orthogonalizer, self.identity = orthogonalizer, bool(identity)
        o, i, kh, kw = self.kernel_shape
        o //= self.groups
        c = max(o, i)
        self.weight = self.new_parameter(self.groups, min(o, i), c)
        several = None if kh == kw == 1 else self.new_parameter(self.groups, kh + kw - 2, c, c // 2)
        self.register_parameter("projectors", several)

    def reset_parameters(self) -> None:
        """Orthogonal matrices divided by sqrt(c), as in the BCOP paper, or the identity."""
        for matrix in (*self.weight, *(() if self.projectors is None else self.projectors.flatten(0, 1))):
            if matrix.numel():
                nn.init.orthogonal_(matrix, gain=matrix.shape[-2] ** -0.5)
        if self.identity:
            self._start_as_identity()
        self.reset_bias()

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        o, i, kh, _ = self.kernel_shape
        T = rectangular_identity(o // self.groups, i, self.weight)
        self.weight.copy_(T if o // self.groups <= i else T.mT)
        if self.projectors is not None:
            half_projectors_(self.projectors, kh - 1)
        if self.orthogonalizer == "cayley":
            for source in self.sources():
                source.copy_(cayley_preimage(source))

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.projectors is None else (self.weight, self.projectors)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        weight, *projectors = sources
        o, i, kh, _ = self.kernel_shape
        orthogonal = find_orthogonalizer(self.orthogonalizer)
        K = orthogonal(weight)[:, None, None]  # (g, 1, 1, min, c)
        N = orthogonal(projectors[0]).unbind(1) if projectors else ()  # (g, c, c // 2) each
        K = block_product(K, N[: kh - 1], N[kh - 1 :]).permute(0, 3, 4, 1, 2)  # (g, min, c, kh, kw)
        K = K if o // self.groups <= i else K.transpose(1, 2)
        return K.flatten(0, 1)  # (o, i, kh, kw)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, orthogonalizer={self.orthogonalizer!r}"


class BCOPConvTranspose2d(TransposedConv2d, BCOPConv2d):
    """Adjoint of the `BCOPConv2d` of the same parameters from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `orthogonalizer` and `identity` as in `BCOPConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> BCOPConvTranspose2d(8, 2, 4, stride=2)(torch.randn(1, 8, 3, 5)).shape
    torch.Size([1, 2, 6, 10])
    """


def block_product(K: Tensor, down: Sequence[Tensor], across: Sequence[Tensor]) -> Tensor:
    """Block convolution of the kernel `K` (g, kh, kw, m, c) with two-tap filters of orthogonal N (g, c, r), in turn.

    One after the other is cheaper than a tree of products of filters: `K` has few taps at first.
    """
    for filters in zip_longest(down, across):
        for axis, N in zip((1, 2), filters, strict=True):
            K = K if N is None else _two_taps(K, N[:, None, None], axis)
    return K


def _two_taps(K: Tensor, N: Tensor, axis: int) -> Tensor:
    """Block convolution of the kernel `K` (g, kh, kw, m, c) with the filter (P, I - P) along an axis, P = N N*."""
    first = (K @ N) @ N.mT
    second = K - first
    end, start = ((0, 1), (1, 0)) if axis == 2 else ((0, 0, 0, 1), (0, 0, 1, 0))
    return F.pad(first, (0, 0, 0, 0, *end)) + F.pad(second, (0, 0, 0, 0, *start))


register_method("bcop", conv=BCOPConv2d, linear="bjorck", transposed=BCOPConvTranspose2d)
register_method(
    "cayley_bcop",
    conv=partial(BCOPConv2d, orthogonalizer="cayley"),
    linear="cayley",
    transposed=partial(BCOPConvTranspose2d, orthogonalizer="cayley"),
)
