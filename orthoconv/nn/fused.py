r"""The Cayley transform of a circular convolution, applied without waste: what training runs.

With W = [U; V] at each frequency, or [U, V] if it has more columns than rows, let M = (I + A) / 2 and R = M^-1:

    A = U - U* + V* V,   Q = [R - I; -V R];        or   A = U - U* + V V*,   Q = [R - I, -R V].

Three savings over the formulas as they stand:

- M is a sum over few taps: of U, of its adjoint, and of the correlation of V with itself, which is found in space. Two
  taps at opposite offsets have conjugate phases, so M is the sum of cosines times real matrices, plus i times that of
  sines times others: one real product gives real and imaginary parts side by side.
- The gradient of Q is never formed. Let y = Q x, and let g and Q* g be the gradients of y and x. Let z = x + y on the
  first n entries and z = x on the rest; likewise v = g + Q* g on the first n entries and v = g on the rest. The
  gradients of M and V are minus the blocks of v z*. That is one product of pixels with pixels, where the derivative of
  an inverse has two of matrices with matrices.
- Frequencies are taken a few at a time: what is computed for them stays in the cache, and its memory is bounded.
"""

__all__ = ["cayley_conv2d", "cayley_head", "cayley_matrices"]

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.elimination import accretive_inverse, lu_factor
from orthoconv.fourier import offsets
from orthoconv.nn.arguments import Pair
from orthoconv.planes import COMPLEX, Plane, chunks, plane
from orthoconv.tracing import is_eager, tensor_cache


class Phases(NamedTuple):
    """Cosines and sines (f, 2 t) of taps at each frequency of a plane, and (2 t, f) for the adjoint of their sum."""

    direct: Tensor
    adjoint: Tensor


class Taps(NamedTuple):
    """M - I / 2 and -V as sums over taps m (2 t, g, n, n, 2) and v (2 t, g, ..., 2).

    The first half is for cosines and has zero imaginary parts, the second is for sines and has zero real parts.
    """

    plane: Plane
    phases: tuple[Phases, Phases]
    wide: bool
    m: Tensor
    v: Tensor | None

    def matrices(self, some: slice) -> tuple[Tensor, Tensor | None]:
        """M and -V, (f g, ...), at some frequencies."""
        M = _sum(self.phases[0].direct[some], self.m)
        M.diagonal(dim1=-2, dim2=-1).add_(0.5)
        return M, None if self.v is None else _sum(self.phases[1].direct[some], self.v)


def cayley_conv2d(
    x: Tensor, W: Tensor, bias: Tensor | None = None, dilation: Pair = (1, 1), groups: int = 1, *, adjoint: bool = False
) -> Tensor:
    """Convolution of (b, i, h, w) by the Cayley transform of the kernel W (o, i / groups, kh, kw); or its adjoint.

    Volumes (b, i, d, h, w) are convolved by a kernel (o, i / groups, kd, kh, kw) likewise.

    >>> x = torch.randn(2, 3, 8, 6)
    >>> y = cayley_conv2d(x, torch.randn(5, 3, 3, 3))
    >>> round((y.norm() / x.norm()).item(), 4)
    1.0
    """
    return _convolve(x, bias, _taps(W, _size(x), dilation, groups), adjoint)


def cayley_head(x: Tensor, W: Tensor, dilation: Pair = (1, 1)) -> Tensor:
    """The first outputs of `cayley_conv2d`, as many as there are inputs: (R - I) x, where W has more rows."""
    taps = _taps(W, _size(x), dilation, 1)
    return _convolve(x, None, taps._replace(v=None), adjoint=False)


def cayley_matrices(W: Tensor, size: Pair, dilation: Pair = (1, 1), groups: int = 1) -> Tensor:
    """The transform itself: Q (f, g, o, i) at each frequency of the plane of images of that size."""
    taps = _taps(W, size, dilation, groups)
    if torch.is_grad_enabled() or not is_eager(W):
        Q = _formed(taps, slice(None))
    else:
        Q = W.new_empty(len(taps.plane) * groups, len(W) // groups, W.shape[1], dtype=COMPLEX[W.dtype])
        for some in _chunks(taps, 0):
            Q[some.start * groups : some.stop * groups] = _formed(taps, some)
    matrices: Tensor = Q.unflatten(0, (-1, groups))
    return matrices


def _formed(taps: Taps, some: slice) -> Tensor:
    """Q at some frequencies."""
    M, V = taps.matrices(some)
    return _form(accretive_inverse(M), V, wide=taps.wide)


def _convolve(x: Tensor, bias: Tensor | None, taps: Taps, adjoint: bool) -> Tensor:
    """The layer as a function of x, of the taps m and v, and of the bias."""

    def forward(x: Tensor, m: Tensor, v: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return _apply(x, bias, taps._replace(m=m, v=v), adjoint)

    backward = partial(_gradients, taps, adjoint)
    return with_gradient((x, taps.m, taps.v, bias), lambda *inputs: forward(*inputs)[0], forward, backward)


def _apply(x: Tensor, bias: Tensor | None, taps: Taps, adjoint: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The layer; and, unless torch differentiates it, what its gradient needs of each chunk of frequencies."""
    p, (g, n) = taps.plane, taps.m.shape[1:3]
    rest = 0 if taps.v is None else taps.v.shape[3 if taps.wide else 2]
    larger = taps.wide == adjoint  # the side of the output
    X, Y, kept = p.transform(x), p.empty(x, g * (n + rest if larger else n)), list[Tensor]()
    for some in _chunks(taps, len(x)):
        T = p.take(X, some, g)
        factors = _factor(*taps.matrices(some), rows=len(x), wide=taps.wide)
        S = _product(T, factors, wide=taps.wide, adjoint=adjoint)
        p.put(Y, some, g, S)
        if not torch.is_grad_enabled():
            T[..., :n] += S[..., :n]
            kept += [T, *factors]
    if bias is not None:
        p.mean(Y).add_(bias * (p.size[0] * p.size[1]))
    return p.invert(Y), tuple(kept)


def _gradients(
    taps: Taps, adjoint: bool, grad: Tensor, needed: Sequence[bool], inputs: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> Tensors:
    """Gradients of x, m, v and the bias."""
    x, m, v, _ = inputs
    taps = taps._replace(m=m, v=v)
    p, (g, n) = taps.plane, taps.m.shape[1:3]
    G, GX = p.transform(grad), p.empty(x, x.shape[1]) if needed[0] else None
    gm, gv = torch.zeros_like(m), None if v is None else torch.zeros_like(v)
    parts = list(_chunks(taps, len(x)))
    each = len(kept) // len(parts)
    for k, some in enumerate(parts):
        before, *factors = kept[k * each : (k + 1) * each]
        T = p.take(G, some, g)
        S = _product(T, tuple(factors), wide=taps.wide, adjoint=not adjoint)
        if GX is not None:
            p.put(GX, some, g, S)
        T[..., :n] += S[..., :n]
        z, w = (T, before) if adjoint else (before, T)  # z and v of the text above
        H = w.mH @ z  # (f g, o, i)
        _accumulate(gm, taps.phases[0].adjoint[:, some], H[:, :n, :n], -1)
        if gv is not None:
            _accumulate(gv, taps.phases[1].adjoint[:, some], H[..., n:] if taps.wide else H[:, n:], 1)
    return (
        None if GX is None else p.invert(GX),
        gm,
        gv,
        p.mean(G).real.sum(0) if needed[3] else None,
    )


def _factor(M: Tensor, V: Tensor | None, *, rows: int, wide: bool) -> tuple[Tensor, ...]:
    """What `_product` needs: Q; or, for large matrices and few rows, the factors of M, and V."""
    if rows >= budget.INVERTED_ROWS * M.shape[-1]:
        return (_form(accretive_inverse(M), V, wide=wide),)
    return *lu_factor(M), M[:, :0] if V is None else V


def _form(R: Tensor, V: Tensor | None, *, wide: bool) -> Tensor:
    """Q from R and -V."""
    other = () if V is None else (R @ V if wide else V @ R,)
    if torch.is_grad_enabled():
        top = R - torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    else:
        top = R
        top.diagonal(dim1=-2, dim2=-1).sub_(1)
    return torch.cat((top, *other), dim=-1 if wide else -2) if other else top


def _product(X: Tensor, factors: tuple[Tensor, ...], *, wide: bool, adjoint: bool) -> Tensor:
    """Q x, or Q* x, for each row x of X (f, b, i)."""
    if len(factors) == 1:
        return X @ (factors[0].conj() if adjoint else factors[0].mT)
    LU, pivots, V = factors
    n = LU.shape[-1]
    N, T = V.conj() if adjoint else V.mT, X[..., :n]
    if wide != adjoint:
        T = torch.baddbmm(T, X[..., n:], N)
    Z: Tensor = torch.linalg.lu_solve(LU, pivots, T.mT, adjoint=adjoint).mT
    if wide != adjoint or not V.numel():
        return Z - X[..., :n]
    return torch.cat((Z - X, Z @ N), dim=-1)


def _chunks(taps: Taps, rows: int) -> Iterator[slice]:
    """Frequencies that are taken at once, for so many images."""
    m, matrix, rest = taps.m, taps.m[0, ..., 0].numel(), 0 if taps.v is None else taps.v[0, ..., 0].numel()
    numbers = 4 * matrix + rest + 4 * rows * (matrix + rest) // m.shape[2]
    return chunks(len(taps.plane), 2 * m.element_size() * numbers, budget.FEWEST_FREQUENCIES, device=m.device)


def _sum(phases: Tensor, taps: Tensor) -> Tensor:
    """Sum over the taps (2 t, g, m, n, 2), each times its cosine or sine: (f g, m, n), complex."""
    return torch.view_as_complex((phases @ taps.flatten(1)).view(-1, *taps.shape[2:]))


def _accumulate(total: Tensor, phases: Tensor, D: Tensor, sign: int) -> None:
    """Add the adjoint of `_sum` for D (f g, m, n), in place."""
    parts = torch.view_as_real(D.contiguous()).reshape(phases.shape[1], -1)
    total.view(len(total), -1).addmm_(phases, parts, alpha=sign)


def _spread(cosines: Tensor, sines: Tensor) -> Tensor:
    """Taps (2 t, ..., 2) of real parts and of imaginary parts, each (t, ...)."""
    zero = torch.zeros_like(cosines)
    return torch.cat((torch.stack((cosines, zero), dim=-1), torch.stack((zero, sines), dim=-1)))


def _size(x: Tensor) -> Any:
    """Height and width of images, or depth, height and width of volumes."""
    return tuple(x.shape[2:])


def _taps(W: Tensor, size: Pair, dilation: Pair, groups: int) -> Taps:
    k: Any = tuple(W.shape[2:])
    W = W.unflatten(0, (groups, -1))  # (g, o, i, kh, kw)
    o, i = W.shape[1:3]
    n, wide = min(o, i), i > o
    U, V = (K.flatten(3).permute(3, 0, 1, 2) for K in (W[:, :n, :n], W[:, :, n:] if wide else W[:, n:]))  # (t, g, ...)
    even, odd, v = [U - U.mT], [U + U.mT], None
    if o != i:
        S = _correlation(W[:, :, n:] if wide else W[:, n:], wide=wide).flatten(3).permute(3, 0, 1, 2)
        S = S[: len(S) // 2 + 1]  # the tap at the opposite offset is the transpose; the last one is at the centre
        even, odd = [*even, S[:-1] + S[:-1].mT, S[-1:]], [*odd, S[:-1] - S[:-1].mT, torch.zeros_like(S[-1:])]
        v = _spread(-V, -V)
    m = _spread(torch.cat(even) / 2, torch.cat(odd) / 2)
    phases = _phases(size, k, dilation, o == i, W.dtype, W.device)
    return Taps(plane(size, W.dtype, W.device), phases, wide, m, v)


def _correlation(V: Tensor, *, wide: bool) -> Tensor:
    """Kernel (g, n, n, 2 kh - 1, 2 kw - 1) of V* V, or of V V* if V is wide, for V (g, o, i, kh, kw)."""
    V = V if wide else V.transpose(1, 2)
    pad, conv = [n - 1 for n in V.shape[3:]], F.conv2d if V.ndim == 5 else F.conv3d
    if budget.has_cache(V.device) or len(V) == 1:
        S = torch.stack([conv(K, K, padding=pad) for K in V])
    else:  # one kernel for all groups
        S = conv(V.transpose(0, 1).flatten(1, 2), V.flatten(0, 1), padding=pad, groups=len(V))
        S = S.unflatten(1, (len(V), -1)).transpose(0, 1)
    return S if wide else S.transpose(1, 2)


@tensor_cache
def _phases(
    size: Pair, k: Pair, dilation: Pair, square: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Phases, Phases]:
    """Phases of the taps of M and of V."""
    p = plane(size, dtype, device)
    V = M = p.phases(*(offsets(t, d) for t, d in zip(k, dilation, strict=True)))
    if not square:
        P = p.phases(*(d * torch.arange(1 - t, t) for t, d in zip(k, dilation, strict=True)))
        M = torch.cat((V, P[:, : P.shape[1] // 2 + 1]), dim=1)

    def parts(P: Tensor) -> Phases:
        direct, adjoint = torch.cat((P.real, P.imag), dim=1), torch.cat((P.real, -P.imag), dim=1)
        return Phases(direct.to(device, dtype), (p.scale[:, None] * adjoint).mT.contiguous().to(device, dtype))

    return parts(M), parts(V)
