"""Inverses, factors and determinants of batches of matrices, right whatever the number of threads.

Note [Batched LU]: after `torch.set_num_threads(2)`, torch's LU of a *batch* of matrices with 152 columns or more is
wrong on some CPUs, often in silence. On a busy machine it used 190 s of CPU and had not returned. oneMKL swaps rows in
threads of its own inside
those of torch (pytorch #141358, #142815). So is everything that starts with an LU: inv, solve, slogdet. Not affected
are single matrices, fewer columns, `lu_solve` with right factors, QR and eigenvalues. A process cannot see whether it
is affected: the same number of threads is harmless if OMP_NUM_THREADS set it. Nor may it try, since it may never
return. So with more than one thread, each large matrix is factored alone, on all threads. Where torch traces or
transforms, QR takes the place of LU, since the number of threads is not known there. Elimination by blocks without
pivots would be fast, but inaccurate: for (I + A) / 2 of order 320 in float32 with a random A of norm 1000, M R is 9e-3
from I, where with pivots it is 5e-5.
"""

from __future__ import annotations

__all__ = ["cholesky", "inverse", "logabsdet", "lu_factor"]

import math
from collections.abc import Callable

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.tracing import is_eager

_ORDER = 128  # of matrices up to which torch's batched LU is right, with a margin


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


def lu_factor(M: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and pivots of M (..., n, n) for `torch.linalg.lu_solve`, as `torch.linalg.lu_factor`; in eager mode.

    >>> M, B = torch.randn(2, 130, 130, dtype=torch.float64), torch.randn(2, 130, 3, dtype=torch.float64)
    >>> torch.dist(M @ torch.linalg.lu_solve(*lu_factor(M), B), B).item() < 1e-8
    True
    """
    if _is_safe(M):
        LU, pivots, _ = torch.linalg.lu_factor_ex(M, check_errors=budget.has_cache(M.device))
    else:
        LU, pivots = _one_by_one(torch.linalg.lu_factor, M)
    return LU, pivots


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
