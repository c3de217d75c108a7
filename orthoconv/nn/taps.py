"""The matrices M = (I + A) / 2 and V of a Cayley transform as sums over the taps of a kernel, at each frequency.

Two taps at opposite offsets have conjugate phases. So M is the sum of cosines times real matrices, plus i times that of
sines times others: one real product gives real and imaginary parts side by side.
"""

__all__ = ["Taps", "accumulate", "gathered", "taps_of"]

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.fourier import offsets
from orthoconv.nn.arguments import Pair
from orthoconv.planes import Plane, plane
from orthoconv.tracing import tensor_cache


class Phases(NamedTuple):
    """Cosines and sines (f, 2 t) of taps at each frequency of a plane, and (2 t, f) for the adjoint of their sum."""

    direct: Tensor
    adjoint: Tensor


class Taps(NamedTuple):
    """M - I / 2 and -V as sums over taps: m (2 t, g, n, n), first for cosines, then for sines; v (t, g, ...) for both.

    The taps v are those of V; their phases have the minus sign.
    """

    plane: Plane
    phases: tuple[Phases, Phases]
    wide: bool
    m: Tensor
    v: Tensor | None

    def matrices(self, *, by_columns: bool = False) -> Callable[[slice], tuple[Tensor, Tensor | None]]:
        """Return the function that gives M and -V, (f g, ...), at some frequencies; the columns of M contiguous or not.

        LAPACK factors matrices by columns, and products are as fast with rows.
        """
        m, rest = _spread(self.m.mT if by_columns else self.m), self.rest()

        def some_of(some: slice) -> tuple[Tensor, Tensor | None]:
            M = _sum(self.phases[0].direct[some], m)
            M = M.mT if by_columns else M
            M.diagonal(dim1=-2, dim2=-1).add_(0.5)
            return M, rest(some)

        return some_of

    def rest(self) -> Callable[[slice], Tensor | None]:
        """Return the function that gives -V alone."""
        v = None if self.v is None else _spread(torch.cat((self.v, self.v)))
        return lambda some: None if v is None else _sum(self.phases[1].direct[some], v)


def taps_of(W: Tensor, size: Pair, dilation: Pair, groups: int) -> Taps:
    """Taps of the Cayley transform of the kernel W (o, i / groups, kh, kw) on images of that size."""
    k: Any = tuple(W.shape[2:])
    W = W.unflatten(0, (groups, -1))  # (g, o, i, kh, kw)
    o, i = W.shape[1:3]
    n, wide = min(o, i), i > o
    K, V = W[:, :n, :n].flatten(3).permute(3, 0, 1, 2), W[:, :, n:] if wide else W[:, n:]  # K (t, g, n, n)
    phases, sign = _phases(size, k, dilation, o == i, W.dtype, W.device)
    if o != i:  # of two taps of the correlation at opposite offsets the first is enough; the last one is at the centre
        K = torch.cat((K, _correlation(V, wide=wide)))
    other = K.mT * sign
    m = torch.cat((K + other, K - other))
    v = None if o == i else V.flatten(3).permute(3, 0, 1, 2)
    return Taps(plane(size, W.dtype, W.device), phases, wide, m, v)


def _sum(phases: Tensor, taps: Tensor) -> Tensor:
    """Sum over the taps (2 t, g, m, n, 2), each times its cosine or sine: (f g, m, n), complex."""
    return torch.view_as_complex((phases @ taps.flatten(1)).view(-1, *taps.shape[2:]))


def accumulate(total: Tensor, phases: Tensor, D: Tensor, sign: int) -> None:
    """Add the adjoint of `_sum` for D (f g, m, n), in place."""
    parts = torch.view_as_real(D.contiguous()).reshape(phases.shape[1], -1)
    total.view(len(total), -1).addmm_(phases, parts, alpha=sign)


def _spread(taps: Tensor) -> Tensor:
    """Taps (2 t, ...) as complex numbers (2 t, ..., 2): those for cosines are real, those for sines imaginary."""
    (cosines, sines), zero = taps.chunk(2), torch.zeros_like(taps[: len(taps) // 2])
    return torch.cat((torch.stack((cosines, zero), dim=-1), torch.stack((zero, sines), dim=-1)))


def gathered(taps: Tensor) -> tuple[Tensor, Tensor]:
    """The adjoint of `_spread`: taps for cosines, and taps for sines."""
    return taps[: len(taps) // 2, ..., 0], taps[len(taps) // 2 :, ..., 1]


def _correlation(V: Tensor, *, wide: bool) -> Tensor:
    """Taps (t, g, n, n) of V* V, or of V V* if V is wide, up to the centre, for V (g, o, i, kh, kw)."""
    V = V if wide else V.transpose(1, 2)  # (g, n, r, kh, kw)
    if budget.has_cache(V.device):
        S = with_gradient(
            (V.movedim((1, 2), (-1, -2)).contiguous(),), _products, lambda P: (_products(P), ()), _products_gradient
        )
    else:  # one kernel for all groups
        pad, conv = [n - 1 for n in V.shape[3:]], F.conv2d if V.ndim == 5 else F.conv3d
        S = conv(V.transpose(0, 1).flatten(1, 2), V.flatten(0, 1), padding=pad, groups=len(V))
        S = S.unflatten(1, (len(V), -1)).transpose(0, 1).flatten(3).permute(3, 0, 1, 2)
        S = S[: len(S) // 2 + 1]
    return S if wide else S.mT


def _products(P: Tensor) -> Tensor:
    """Sums of a^T b over the taps a and b of P (g, kh, kw, r, n) at each distance, up to the centre: (t, g, n, n).

    A convolution would multiply by its padding, too: five times the operations for 3 x 3 taps.
    """
    pairs = _overlaps(P.shape[1:-2])
    return torch.stack([P[first].flatten(1, -2).mT @ P[second].flatten(1, -2) for first, second in pairs])


def _products_gradient(grad: Tensor, needed: object, inputs: tuple[Tensor], kept: object) -> Tensors:
    (P,) = inputs
    total = torch.zeros_like(P)
    for G, (first, second) in zip(grad, _overlaps(P.shape[1:-2]), strict=True):
        a, b = P[first], P[second]
        total[first] += (b.flatten(1, -2) @ G.mT).view(b.shape)
        total[second] += (a.flatten(1, -2) @ G).view(a.shape)
    return (total,)


def _overlaps(k: Sequence[int]) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Taps of a kernel of that size that lie at each distance from each other, up to the centre; after all groups."""
    sides = [[(slice(max(0, d), n + min(0, d)), slice(max(0, -d), n - max(0, d))) for d in range(1 - n, n)] for n in k]
    pairs = list(product(*sides))
    whole = slice(None)
    return [
        ((whole, *(first for first, _ in pair)), (whole, *(second for _, second in pair)))
        for pair in pairs[: len(pairs) // 2 + 1]
    ]


@tensor_cache
def _phases(
    size: Pair, k: Pair, dilation: Pair, square: bool, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Phases, Phases], Tensor]:
    """Phases of the taps of M and of -V; sign (t, 1, 1, 1) of the transpose of each tap of M.

    A tap of U has the transpose with the other sign at the opposite offset, and one of V* V with the same sign. The
    centre is its own opposite, so it counts half.
    """
    p = plane(size, dtype, device)
    V = M = p.phases(*(offsets(t, d) for t, d in zip(k, dilation, strict=True)))
    sign = torch.full((M.shape[1],), -1.0)
    if not square:
        P = p.phases(*(d * torch.arange(1 - t, t) for t, d in zip(k, dilation, strict=True)))
        P = P[:, : P.shape[1] // 2 + 1]
        M, sign = torch.cat((V, P[:, :-1], P[:, -1:] / 2), dim=1), torch.cat((sign, torch.ones(P.shape[1])))

    def parts(P: Tensor) -> Phases:
        direct, adjoint = torch.cat((P.real, P.imag), dim=1), torch.cat((P.real, -P.imag), dim=1)
        return Phases(direct.to(device, dtype), (p.scale[:, None] * adjoint).mT.contiguous().to(device, dtype))

    return (parts(M / 2), parts(-V)), sign.view(-1, 1, 1, 1).to(device, dtype)
