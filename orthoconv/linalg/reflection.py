"""Orthonormal columns, and reflections at their complement."""

from __future__ import annotations

__all__ = ["orthonormal", "reflect", "resized"]

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.elimination import cholesky
from orthoconv.linalg.norms import DOUBLE
from orthoconv.products import product


def orthonormal(V: Tensor) -> Tensor:
    r"""Orthonormal columns with the same range as those of a tall `V`, by Cholesky's factors of V* V, three times.

    .. math:: X = V L^{-*} (I + \tfrac{e}{2} L^{-1} L^{-*}), \qquad L L^* = V^* V + e I,

    where the columns of V are divided by their norms, and e is a few units of rounding. The singular values of X are
    never above 1, whatever V; the other turns bring those that are near to 1 there. A zero column stays zero. The
    work is done in float64 where the device has it.

    Arguments:
        V: Real or complex matrices, of shape (..., c, r) with c >= r.

    >>> X = orthonormal(torch.randn(5, 3, dtype=torch.float64))
    >>> torch.dist(X.mT @ X, torch.eye(3)).item() < 1e-14
    True
    """
    X = V.to(DOUBLE.get(V.dtype, V.dtype)) if budget.has_double(V.device) else V
    I = torch.eye(V.shape[-1], dtype=X.dtype, device=X.device)  # noqa: E741
    e = 4 * sum(V.shape[-2:]) * torch.finfo(X.dtype).eps
    for _ in range(3):
        norms = torch.linalg.vector_norm(X.detach(), dim=-2, keepdim=True)
        X = X / norms.where(norms > torch.finfo(X.dtype).tiny, 1)
        L = cholesky(X.mH @ X + e * I)
        T = torch.linalg.solve_triangular(L, I, upper=False)
        X = X @ (T.mH @ (I + 0.5 * e * (T @ T.mH)))
    return X.to(V.dtype)


def reflect(x: Tensor, V: Tensor, L: Tensor, features: int) -> Tensor:
    r"""First `features` entries of each row of `x`, reflected at the orthogonal complement of the columns of `V`.

    .. math:: x - 2 V z, \qquad z = (V^T V)^{-1} V^T x,

    where `x` has zeros appended to the length of a column. With u the same numbers of the gradient as z of `x`, and
    both residuals p = x - V z and q = grad - V u, the gradient of V is -2 (p u^T + q z^T). The reflection is not
    formed. V^T V is factored in the precision of `V`.

    Arguments:
        x: Real, of shape (b, n).
        V: Real, of shape (c, r), with c >= n, c >= features and c >= r.
        L: What `gram_factor` returns for V.
        features: Number of the entries.

    >>> x, V = torch.randn(2, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    >>> L = torch.linalg.cholesky(V.mT @ V)
    >>> torch.dist(reflect(reflect(x, V, L, 5), V, L, 5), x).item() < 1e-13
    True
    """

    def ordinary(x: Tensor, V: Tensor) -> Tensor:
        L = torch.linalg.cholesky(V.mT @ V)
        return resized(x, features) - 2 * torch.cholesky_solve(V[: x.shape[1]].mT @ x.mT, L).mT @ V[:features].mT

    def forward(x: Tensor, V: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        z = torch.cholesky_solve(product(x, V[: x.shape[1]]).mT, L).mT
        return torch.sub(resized(x, features), product(z, V[:features].mT), alpha=2), (z,)

    def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> Tensors:
        (x, V), (z,) = inputs, kept
        u = torch.cholesky_solve(product(grad, V[:features]).mT, L).mT
        residuals = torch.cat((resized(x, len(V)), resized(grad, len(V))))
        residuals.sub_(product(torch.cat((z, u)), V.mT))
        gV = product(residuals.mT, torch.cat((u, z))).mul_(-2)
        q = residuals[len(x) :]
        q[:, :features].mul_(2).sub_(grad)  # the gradient of x is grad - 2 V u, or 2 q - grad
        q[:, features:].mul_(2)
        return q[:, : x.shape[1]], gV

    return with_gradient((x, V), ordinary, forward, backward)


def resized(x: Tensor, n: int) -> Tensor:
    """Cut off entries of the last axis, or append zeros, to length n.

    Arguments:
        x: Tensor (..., m).
        n: Length of the last axis of the result.

    >>> resized(torch.ones(1, 2), 3)
    tensor([[1., 1., 0.]])
    """
    return x[..., :n] if x.shape[-1] >= n else F.pad(x, (0, n - x.shape[-1]))
