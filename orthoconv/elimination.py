"""Inverses, factors and determinants of batches of matrices, right whatever the number of threads.

Note [Batched LU]: after `torch.set_num_threads(2)`, torch's LU of a *batch* of matrices with 152 columns or more is
wrong on some CPUs, often in silence. On a busy machine it used 190 s of CPU and had not returned. oneMKL swaps rows in
threads of its own inside those of torch (pytorch #141358, #142815). So is everything that starts with an LU: inv,
solve, slogdet; and so are tall matrices of fewer columns, such as 256 x 107. Not affected are single matrices, square
ones of fewer columns, `lu_solve` with right factors, QR and eigenvalues. A process cannot see whether it is affected:
the same number of threads is harmless if OMP_NUM_THREADS set it. Nor may it try, since it may never return. So with
more than one thread, each large matrix is factored alone, on all threads. Where torch traces or transforms, QR takes
the place of LU, since the number of threads is not known there.

Note [No pivots]: the Hermitian part of M = (I + A) / 2, and of each of its Schur complements, is at least I / 2. So
each block on the diagonal has an inverse of norm 2 at the most, and no rows need be exchanged: `accretive_inverse`
eliminates by halves, in products. Products run at the peak of a processor. oneMKL's inverses of small matrices ran at
a fifth of it on an AMD processor; in products of blocks they took 0.55 to 0.75 of the time for orders 32 to 320, and
by halves, whose products are larger, 0.75 to 1.0 of that (0.78 at orders 64 and 128). On an Intel Xeon, LAPACK takes
longer for a complex matrix of 8 rows than for one of 16; an elimination of all frequencies at once takes a sixth of
that. LU factors are not as slow, so few images are solved for with them. What is lost is accuracy at large norms. In
float32, |Q* Q - I| of the Cayley transform is as with pivots while |A| is up to 16, up to 3 times that at 32, 5 times
at 64, and 16 times at 256. So matrices of a Frobenius norm of more than 3 sqrt(n) are left to LAPACK. Up to that norm,
random A of ranks 1 to n gave at most 0.36 of the error that is allowed, 2e-6 sqrt(n); LAPACK gave up to 0.68.
"""

from __future__ import annotations

__all__ = ["accretive_inverse", "cholesky", "inverse", "logabsdet", "lu_factor"]

import math
from collections.abc import Callable

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.tracing import is_eager

_ORDER = 128  # of matrices up to which torch's batched LU is right, with a margin
_SMALL = 16  # Blocks of fewer rows are inverted row by row, for all frequencies at once, those of so many by LAPACK;
_BLOCK = {True: 16, False: 64}  # in matrices of 64 rows and more it inverts those of so many, complex or real.


def inverse(M: Tensor, *, check: bool = False) -> Tensor:
    """Inverses of M (..., n, n), as `torch.linalg.inv`.

    Arguments:
        M: Square matrices.
        check: Whether a singular matrix is an error on an accelerator, too, for which the host must wait.

    >>> M = torch.randn(2, 130, 130, dtype=torch.float64)
    >>> torch.dist(M @ inverse(M), torch.eye(130)).item() < 1e-8
    True
    """
    if _is_safe(M):
        R: Tensor = torch.linalg.inv_ex(M, check_errors=check or budget.has_cache(M.device)).inverse
        return R

    def forward(M: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (R,) = _one_by_one(lambda M: (torch.linalg.inv(M),), M)
        return R, (R,)

    def backward(grad: Tensor, needed: object, inputs: object, kept: tuple[Tensor, ...]) -> Tensors:
        (R,) = kept
        return (-R.mH @ grad @ R.mH,)

    return with_gradient((M,), _inverse_by_qr, forward, backward, keep_inputs=False)


def accretive_inverse(M: Tensor) -> Tensor:
    """Inverses of M = (I + A) / 2 (f, n, n) with A + A* >= 0; on a CPU by blocks, which overwrites M.

    Where gradients are recorded, or torch traces, it is `inverse`.

    >>> A = torch.ones(2, 20, 20).tril(-1) - torch.ones(2, 20, 20).triu(1)
    >>> M = (torch.eye(20) + A) / 2
    >>> torch.dist(M @ accretive_inverse(M.clone()), torch.eye(20)).item() < 1e-5
    True
    """
    if torch.is_grad_enabled() or not is_eager(M) or not _is_moderate(M):
        return inverse(M)
    _invert(M, _SMALL if M.shape[-1] < 64 else _BLOCK[M.is_complex()])
    return M


def _is_moderate(M: Tensor) -> bool:
    """Whether elimination without pivots is accurate for all M (f, n, n): see Note [No pivots]."""
    if not budget.has_cache(M.device) or M.numel() == 0:
        return False
    if M.dtype in (torch.float64, torch.complex128):
        return True
    entries = (torch.view_as_real(M) if M.is_complex() else M).flatten(1)
    square = 4 * float(torch.linalg.vector_norm(entries, dim=1).max()) ** 2 - M.shape[-1]  # at least |A|^2
    return square <= budget.UNPIVOTED_NORM**2 * M.shape[-1]


def _invert(M: Tensor, least: int) -> None:
    """Overwrite M (f, n, n) by its inverses: halves by halves, without pivots, down to blocks of `least` rows."""
    n = M.shape[-1]
    if n <= least:
        M.copy_(_by_rows(M) if n < _SMALL else torch.linalg.inv_ex(M).inverse)
        return
    h = n // 2 if n < 32 else -(-n // 16) * 8  # rows of eight numbers start in a line of the cache
    A, B, C, D = M[:, :h, :h], M[:, :h, h:], M[:, h:, :h], M[:, h:, h:]
    _invert(A, least)
    AB, CA = torch.bmm(A, B), torch.bmm(C, A)
    D.sub_(torch.bmm(C, AB))  # the Schur complement
    _invert(D, least)
    ABD = torch.bmm(AB, D)
    A.add_(torch.bmm(ABD, CA))
    torch.neg(ABD, out=B)
    torch.neg(torch.bmm(D, CA), out=C)


def _by_rows(M: Tensor) -> Tensor:
    """Inverses of M (f, n, n) by Gauss and Jordan's elimination without pivots, one row at a time."""
    T = M.permute(1, 2, 0).contiguous()  # (n, n, f)
    for k in range(len(T)):
        pivot = T[k, k].reciprocal()
        row, column = T[k] * pivot, T[:, k].clone()
        row[k], T[:, k] = pivot, 0
        T.addcmul_(column[:, None], row, value=-1)
        T[k] = row
    return T.permute(2, 0, 1)


def lu_factor(M: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """Factors and pivots of M (..., n, n) for `torch.linalg.lu_solve`, as `torch.linalg.lu_factor`; in eager mode.

    Arguments:
        M: Square matrices.
        overwrite: Whether the factors may take the place of M (f, n, n). They do on a CPU, without gradients, if its
            columns are contiguous, as LAPACK has them. This saves two copies and new memory, a third of the time.

    >>> M, B = torch.randn(2, 130, 130, dtype=torch.float64), torch.randn(2, 130, 3, dtype=torch.float64)
    >>> torch.dist(M @ torch.linalg.lu_solve(*lu_factor(M), B), B).item() < 1e-8
    True
    """
    if overwrite and _is_by_columns(M) and not torch.is_grad_enabled() and is_eager(M):
        return M, _factor_in_place(M)
    if _is_safe(M):
        LU, pivots, _ = torch.linalg.lu_factor_ex(M, check_errors=budget.has_cache(M.device))
    else:
        LU, pivots = _one_by_one(torch.linalg.lu_factor, M)
    return LU, pivots


def _is_by_columns(M: Tensor) -> bool:
    return M.ndim == 3 and budget.has_cache(M.device) and M.mT.is_contiguous()


def _factor_in_place(M: Tensor) -> Tensor:
    """Overwrite M (f, n, n), whose columns are contiguous, by its factors; return the pivots."""
    pivots, status = (torch.empty(shape, dtype=torch.int32) for shape in (M.shape[:2], M.shape[:1]))
    at_once = _is_safe(M) or torch.get_num_threads() == 1
    for room in [(M, pivots, status)] if at_once else zip(M, pivots, status, strict=True):
        torch.linalg.lu_factor_ex(room[0], check_errors=True, out=room)
    return pivots


def cholesky(M: Tensor) -> Tensor:
    """Cholesky's factors of M (..., n, n), as `torch.linalg.cholesky`.

    On an accelerator the host does not wait to see whether a matrix is positive definite: the factor of one that is not
    has entries NaN instead of raising an error.

    >>> cholesky(4 * torch.eye(2))
    tensor([[2., 0.],
            [0., 2.]])
    """
    if budget.has_cache(M.device):
        L: Tensor = torch.linalg.cholesky(M)
        return L
    L, failed = torch.linalg.cholesky_ex(M)
    return torch.where(failed[..., None, None] == 0, L, math.nan)


def logabsdet(M: Tensor) -> Tensor:
    """Logarithms of the absolute determinants of M (..., n, n), as `torch.linalg.slogdet`.

    >>> logabsdet(torch.eye(130).repeat(2, 1, 1))
    tensor([0., 0.])
    """
    if _is_safe(M):
        values: Tensor = torch.linalg.slogdet(M).logabsdet
    elif is_eager(M):
        (values,) = _one_by_one(lambda m: (torch.linalg.slogdet(m).logabsdet,), M)
    else:
        values = torch.linalg.qr(M).R.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    return values


def _is_safe(M: Tensor) -> bool:
    """Whether torch's LU of M (..., n, n) is right with any number of threads: see Note [Batched LU]."""
    if M.shape[-1] <= _ORDER or M.device.type != "cpu":
        return True
    single = M.shape[:-2].numel() <= 1  # as far as can be seen: under vmap it is one of a batch
    return single and (is_eager(M) or torch.compiler.is_compiling())


Factor = Callable[[Tensor], tuple[Tensor, ...]]


def _one_by_one(function: Factor, M: Tensor) -> tuple[Tensor, ...]:
    """Apply the function to one matrix at a time, or to all of them if there is one thread.

    The order of entries is that of a batch, columns first.
    """
    if torch.get_num_threads() == 1:
        return tuple(function(M))
    rows = [function(m) for m in M.flatten(0, -3)]
    stacked = (torch.stack([p.mT if p.ndim == 2 else p for p in part]) for part in zip(*rows, strict=True))
    return tuple((p.mT if p.ndim == 3 else p).unflatten(0, M.shape[:-2]) for p in stacked)


def _inverse_by_qr(M: Tensor) -> Tensor:
    Q, R = torch.linalg.qr(M)
    X: Tensor = torch.linalg.solve_triangular(R, Q.mH, upper=True)
    return X
