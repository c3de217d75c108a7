r"""The Cayley transform of a circular convolution, applied without waste: what training runs.

With W = [U; V] at each frequency, or [U, V] if it has more columns than rows, let M = (I + A) / 2 and R = M^-1:

    A = U - U* + V* V,   Q = [R - I; -V R];        or   A = U - U* + V V*,   Q = [R - I, -R V].

Three savings over the formulas as they stand:

- M is a sum over few taps: of U, of its adjoint, and of the correlation of V with itself, which is found in space.
- The gradient of Q is never formed. Let y = Q x, and let g and Q* g be the gradients of y and x. Let z = x + y on the
  first n entries and z = x on the rest; likewise v = g + Q* g on the first n entries and v = g on the rest. The
  gradients of M and V are minus the blocks of v z*. That is one product of pixels with pixels, where the derivative of
  an inverse has two of matrices with matrices.
- Frequencies are taken a few at a time: what is computed for them stays in the cache, and its memory is bounded.
"""

from __future__ import annotations

__all__ = ["cayley_at", "cayley_conv2d", "cayley_head", "cayley_matrices"]

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.elimination import accretive_inverse, lu_factor
from orthoconv.nn.arguments import Pair
from orthoconv.nn.taps import Taps, accumulate, gathered, taps_of
from orthoconv.planes import COMPLEX, FastPlane, Plane, chunks
from orthoconv.tracing import is_eager


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
    return _convolve(x, bias, taps_of(W, _size(x), dilation, groups), adjoint)


def cayley_head(x: Tensor, W: Tensor, dilation: Pair = (1, 1)) -> Tensor:
    """The first outputs of `cayley_conv2d`, as many as there are inputs: (R - I) x, where W has more rows."""
    taps = taps_of(W, _size(x), dilation, 1)
    return _convolve(x, None, taps._replace(v=None), adjoint=False)


def cayley_matrices(W: Tensor, size: Pair, dilation: Pair = (1, 1), groups: int = 1) -> Tensor:
    """The transform itself: Q (f, g, o, i) at each frequency of the plane of images of that size."""
    taps = taps_of(W, size, dilation, groups)
    matrices = taps.matrices()
    if torch.is_grad_enabled() or not is_eager(W):
        Q, _ = _form(*matrices(slice(None)), wide=taps.wide)
    else:
        Q = W.new_empty(len(taps.plane) * groups, len(W) // groups, W.shape[1], dtype=COMPLEX[W.dtype])
        for some in _chunks(taps, 0):
            Q[some.start * groups : some.stop * groups], _ = _form(*matrices(some), wide=taps.wide)
    by_group: Tensor = Q.unflatten(0, (-1, groups))
    return by_group


def cayley_at(W: Tensor, size: Pair, dilation: Pair = (1, 1), groups: int = 1) -> Callable[[slice], Tensor]:
    """The function that gives the transform at some frequencies of the plane, (f g, o, i)."""
    taps = taps_of(W, size, dilation, groups)
    matrices = taps.matrices()
    return lambda some: _form(*matrices(some), wide=taps.wide)[0]


def _convolve(x: Tensor, bias: Tensor | None, taps: Taps, adjoint: bool) -> Tensor:
    """The layer as a function of x, of the taps m and v, and of the bias."""

    def forward(x: Tensor, m: Tensor, v: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        return _apply(x, bias, taps._replace(m=m, v=v), adjoint)

    inputs, backward = (x, taps.m, taps.v, bias), partial(_gradients, taps, adjoint)
    restore = partial(_restored, taps, adjoint, x.detach().new_zeros(()).expand(x.shape))
    return with_gradient(inputs, lambda *inputs: forward(*inputs)[0], forward, backward, restore=restore)


def _apply(x: Tensor, bias: Tensor | None, taps: Taps, adjoint: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The layer; and, unless torch differentiates it, what its gradient needs of each chunk of frequencies."""
    p, (g, n) = taps.plane, taps.m.shape[1:3]
    rest = 0 if taps.v is None else taps.v.shape[3 if taps.wide else 2]
    larger = taps.wide == adjoint  # the side of the output
    X, kept, matrices = p.transform(x), list[Tensor](), taps.matrices(by_columns=not _inverts(taps.m, len(x)))
    Y, keeps = _room(p, X, x, g * (n + rest if larger else n)), _keeps_factors(taps, len(x))
    for some in _chunks(taps, len(x)):
        T = p.take(X, some, g)
        S, factors = _applied(T, *matrices(some), wide=taps.wide, adjoint=adjoint)
        p.put(Y, some, g, S)
        if not torch.is_grad_enabled():
            T[..., :n] += S[..., :n]
            kept += [T, *factors] if keeps else [T]
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
    G = p.transform(grad)
    gbias = p.mean(G).real.sum(0) if needed[3] else None
    GX = _room(p, G, x, x.shape[1]) if needed[0] else None
    gm, gv = m.new_zeros(*m.shape, 2), None if v is None else v.new_zeros(2 * len(v), *v.shape[1:], 2)
    parts = list(_chunks(taps, len(x)))
    each = len(kept) // len(parts)
    matrices = taps.matrices(by_columns=not _inverts(m, len(x))) if each == 1 else None
    rest = taps.rest() if each > 1 and budget.has_cache(x.device) else None
    for k, some in enumerate(parts):
        before, *factors = kept[k * each : (k + 1) * each]
        if matrices is not None:
            M, V = matrices(some)
            factors = [*_factor(M, len(x))]
        elif rest is not None:
            V = rest(some)
        else:
            V = factors.pop() if len(factors) == 3 else None
        T = p.take(G, some, g)
        S = _product(T, tuple(factors), V, wide=taps.wide, adjoint=not adjoint)
        if GX is not None:
            p.put(GX, some, g, S)
        T[..., :n] += S[..., :n]
        z, w = (T, before) if adjoint else (before, T)  # z and v of the text above
        H = w.mH @ z  # (f g, o, i)
        accumulate(gm, taps.phases[0].adjoint[:, some], H[:, :n, :n], -1)
        if gv is not None:
            accumulate(gv, taps.phases[1].adjoint[:, some], H[..., n:] if taps.wide else H[:, n:], 1)
    gx = None if GX is None else p.invert(GX)
    return gx, torch.cat(gathered(gm)), None if gv is None else torch.add(*gathered(gv)), gbias


@torch.no_grad()
def _restored(taps: Taps, adjoint: bool, like: Tensor, kept: Sequence[Tensor]) -> Tensor:
    """Images x of the shape of `like`, from what `_apply` keeps: M z = x on the first n entries, but for those of V."""
    p, (g, n), matrices = taps.plane, taps.m.shape[1:3], taps.matrices()
    X, parts = p.empty(like, like.shape[1]), list(_chunks(taps, len(like)))
    for some, z in zip(parts, kept[:: len(kept) // len(parts)], strict=True):
        M, V = matrices(some)  # -V
        x = z.clone()
        x[..., :n] = z[..., :n] @ (M.conj() if adjoint else M.mT)
        if V is not None and z.shape[-1] > n:
            x[..., :n] -= z[..., n:] @ (V.conj() if adjoint else V.mT)
        p.put(X, some, g, x)
    return p.invert(X)


def _room(p: Plane, X: Tensor, x: Tensor, channels: int) -> Tensor:
    """Room for the coefficients of so many channels: that of X, which are taken before others are put, if it fits."""
    fits = channels == X.shape[-2 if isinstance(p, FastPlane) else -1]
    return X if fits and budget.has_cache(x.device) and not torch.is_grad_enabled() else p.empty(x, channels)


def _keeps_factors(taps: Taps, rows: int) -> bool:
    """Whether factors are kept for the backward pass; if not, they are computed again. An accelerator keeps them.

    Those of order n take n / b times the memory of b images.
    """
    m, n = taps.m, taps.m.shape[-1]
    size = len(taps.plane) * m[0].numel() * 2 * m.element_size()
    few = n <= budget.FACTORS_KEPT * rows or size <= budget.FACTORS_BYTES
    return few or n > budget.FACTORS_ORDER or not budget.has_cache(m.device)


def _applied(X: Tensor, M: Tensor, V: Tensor | None, *, wide: bool, adjoint: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Q x, or Q* x, for each row x of X (f, b, i), and what is kept for the gradient.

    On a CPU that is what `_factor` gives, and V is summed again. That takes more kernels, so an accelerator keeps Q, or
    the factors and V.
    """
    again = V is None or budget.has_cache(X.device)
    if _inverts(M, X.shape[1]):
        Q, top = _form(M, V, wide=wide)
        return X @ (Q.conj() if adjoint else Q.mT), (top if again else Q,)
    factors = lu_factor(M, overwrite=True)
    return _product(X, factors, V, wide=wide, adjoint=adjoint), factors if V is None or again else (*factors, V)


def _inverts(M: Tensor, rows: int) -> bool:
    """Whether M (f g, n, n) is inverted; for large matrices and few rows it is factored."""
    n, (here, accelerated) = M.shape[-1], budget.INVERTED_ORDER
    return rows >= budget.INVERTED_ROWS * n or n <= (here if budget.has_cache(M.device) else accelerated)


def _factor(M: Tensor, rows: int) -> tuple[Tensor, ...]:
    """What `_product` needs of M, which may be overwritten: R - I, or the factors of M."""
    return (_form(M, None, wide=False)[1],) if _inverts(M, rows) else lu_factor(M, overwrite=True)


def _form(M: Tensor, V: Tensor | None, *, wide: bool) -> tuple[Tensor, Tensor]:
    """Q from M, which may be overwritten, and -V; and R - I, its square block."""
    R = accretive_inverse(M)
    other = () if V is None else (R @ V if wide else V @ R,)
    if torch.is_grad_enabled():
        top = R - torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    else:
        top = R
        top.diagonal(dim1=-2, dim2=-1).sub_(1)
    return torch.cat((top, *other), dim=-1 if wide else -2) if other else top, top


def _product(X: Tensor, factors: tuple[Tensor, ...], V: Tensor | None, *, wide: bool, adjoint: bool) -> Tensor:
    """Q x, or Q* x, for each row x of X (f, b, i), from what `_factor` gives and -V."""
    n, narrows = factors[0].shape[-1], wide != adjoint
    N = None if V is None else V.conj() if adjoint else V.mT
    if len(factors) == 1:
        P = factors[0].conj() if adjoint else factors[0].mT
        if N is None:
            return X @ P
        if narrows:
            T = X[..., n:] @ N
            return T.baddbmm_(X[..., :n] + T, P)
        S = X @ P
        return torch.cat((S, (S + X) @ N), dim=-1)
    T = X[..., :n] if N is None or not narrows else torch.baddbmm(X[..., :n], X[..., n:], N)
    Z: Tensor = torch.linalg.lu_solve(*factors, T.mT, adjoint=adjoint).mT
    return Z - X[..., :n] if N is None or narrows else torch.cat((Z - X, Z @ N), dim=-1)


def _chunks(taps: Taps, rows: int) -> Iterator[slice]:
    """Frequencies that are taken at once, for so many images."""
    m, matrix, rest = taps.m, taps.m[0].numel(), 0 if taps.v is None else taps.v[0].numel()
    numbers = 4 * matrix + rest + 4 * rows * (matrix + rest) // m.shape[-1]
    return chunks(len(taps.plane), 2 * m.element_size() * numbers, budget.FEWEST_FREQUENCIES, device=m.device)


def _size(x: Tensor) -> Any:
    """Height and width of images, or depth, height and width of volumes."""
    return tuple(x.shape[2:])
