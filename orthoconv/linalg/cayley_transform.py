"""The Cayley transform, Appendix A.1."""

__all__ = ["cayley", "cayley_linear", "cayley_preimage", "is_large", "pivot_signs"]

from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.elimination import inverse, lu_factor
from orthoconv.linalg.norms import DOUBLE, lower_gram, positive_norm, weight_norm_gradients, weight_scale
from orthoconv.products import dense, product
from orthoconv.tracing import is_concrete


def cayley(W: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix of the same shape as `W`, by the Cayley transform.

    With the rows of a tall `W` split into a square `U` and the rest `V` (Appendix A.1),

    .. math:: Q = \begin{bmatrix} (I - A)(I + A)^{-1} \\ -2 V (I + A)^{-1} \end{bmatrix},
              \qquad A = U - U^* + V^* V.

    The inverse always exists: its spectrum has real part at least 1. The numerator is never formed,
    since :math:`(I - A)(I + A)^{-1} = 2 (I + A)^{-1} - I`: one product fewer, and it stays
    orthogonal for weights so large that the quotient loses every digit (docs/maths.md).
    A wide `W` is transposed, which commutes with the transform.

    Arguments:
        W: Real or complex matrices, of shape (..., m, n).

    Returns:
        Q of shape (..., m, n), with Q* Q = I if m >= n, and Q Q* = I if m <= n.

    >>> Q = cayley(torch.randn(5, 3, dtype=torch.float64))
    >>> torch.dist(Q.mT @ Q, torch.eye(3)).item() < 1e-14
    True
    """
    if W.ndim < 2 or not (W.is_floating_point() or W.is_complex()):
        raise ValueError(f"cayley takes real or complex matrices of shape (..., m, n), got {tuple(W.shape)} {W.dtype}")
    m, n = W.shape[-2:]
    if m < n:
        return cayley(W.mT).mT
    if W.dtype in DOUBLE and ((m > n and budget.has_double(W.device)) or _has_large_norm(W)):
        return cayley(W.to(DOUBLE[W.dtype])).to(W.dtype)  # rounding A, and V*V the more, costs Q its orthogonality
    U, V = W[..., :n, :], W[..., n:, :]
    I = torch.eye(n, dtype=W.dtype, device=W.device)  # noqa: E741
    A = U - U.mH if m == n else U - U.mH + V.mH @ V  # inductor cannot compile an empty complex V
    R = 2 * inverse(I + A)
    return R - I if m == n else torch.cat((R - I, -V @ R), dim=-2)


def is_large(W: Tensor) -> bool:
    """Whether an entry of W exceeds `budget.EXACT_NORM`, in float32, and where it is cheap to look: on a CPU, untraced.

    Arguments:
        W: Weights of any shape.

    >>> is_large(torch.tensor(65.0)), is_large(torch.eye(2)), is_large(torch.tensor(65.0, dtype=torch.float64))
    (True, False, False)
    """
    return _is_seen(W) and bool(W.detach().abs().max() > budget.EXACT_NORM)


def _has_large_norm(W: Tensor) -> bool:
    """Whether the Frobenius norm of one of the matrices W exceeds `budget.EXACT_NORM`, where `is_large` would look."""
    return _is_seen(W) and bool(torch.linalg.vector_norm(W.detach(), dim=(-2, -1)).max() > budget.EXACT_NORM)


def _is_seen(W: Tensor) -> bool:
    return W.dtype in DOUBLE and W.numel() > 0 and budget.has_cache(W.device) and is_concrete(W)


def cayley_preimage(Q: Tensor, damping: float = 0.0) -> Tensor:
    """A matrix whose Cayley transform is the semi-orthogonal `Q` (..., m, n); its square block has no eigenvalue -1.

    An eigenvalue near -1 gives a large preimage. With a damping > 0, which is added to all eigenvalues, the preimage is
    smaller, and its transform is another matrix than `Q`.

    Arguments:
        Q: Semi-orthogonal matrices (..., m, n).
        damping: Number that is added to the eigenvalues.

    >>> W = torch.randn(5, 3, dtype=torch.float64)
    >>> torch.dist(cayley(cayley_preimage(cayley(W))), cayley(W)).item() < 1e-12
    True
    """
    m, n = Q.shape[-2:]
    if m < n:
        return cayley_preimage(Q.mT, damping).mT
    I = torch.eye(n, dtype=Q.dtype, device=Q.device)  # noqa: E741
    S = inverse((1 + damping) * I + Q[..., :n, :])  # (I + A) / 2 in the notation of `cayley`
    return torch.cat(((S - S.mH) / 2, -Q[..., n:, :] @ S), dim=-2)


def pivot_signs(Q: Tensor) -> Tensor:
    """Signs (n,) of the columns of a real matrix (m, n), with which its square block Q s has no eigenvalue near -1.

    They make all pivots of the elimination of I + Q s at least 1; then its determinant is at least 1.

    Arguments:
        Q: Matrix (m, n) with orthogonal rows or columns.

    >>> pivot_signs(-torch.eye(2))
    tensor([-1., -1.])
    """
    n = min(Q.shape)
    R, signs = Q[:n, :n].clone(), torch.ones(Q.shape[1], dtype=Q.dtype, device=Q.device)
    for k in range(n):
        signs[k] = torch.where(R[k, k] < 0, -1.0, 1.0)
        R[k + 1 :, k + 1 :].addr_(R[k + 1 :, k] * (signs[k] / (1 + R[k, k].abs())), R[k, k + 1 :], alpha=-1)
    return signs


def cayley_linear(x: Tensor, V: Tensor, g: Tensor) -> Tensor:
    r"""Product of each row of `x` with the wide or square ``cayley(g * V / |V|)``, which is never formed.

    With g V / |V| = [U, V'], and x split into the same columns,

    .. math:: \mathrm{cayley}(\cdot)\, x = M^{-1} (x_U - V' x_V) - x_U, \qquad M = (I + U - U^T + V' V'^T) / 2.

    Nor is its gradient formed: that of M is :math:`-v z^T`, where :math:`z = M^{-1} (x_U - V' x_V)` and
    :math:`v = M^{-T}` times the gradient of z. The product V' V'^T is rounded in the precision of `V`, which `cayley`
    avoids: for weights of large norm with a V' of low rank, the two differ.

    Arguments:
        x: Real, of shape (b, n).
        V: Real, of shape (m, n) with m <= n.
        g: A number, the norm.

    >>> x, V = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    >>> torch.dist(cayley_linear(x, V, V.norm()), x @ cayley(V).mT).item() < 1e-13
    True
    """
    return with_gradient((x, V, g), _cayley_linear_formed, _cayley_linear, _cayley_linear_gradients)


def _cayley_linear_formed(x: Tensor, V: Tensor, g: Tensor) -> Tensor:
    return x @ cayley(V * weight_scale(V, g)).mT


def _cayley_linear(x: Tensor, V: Tensor, g: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    m, norm = len(V), positive_norm(V)
    s, xU, (U, rest) = g / norm, x[:, :m], (V[:, :m], dense(V[:, m:]))
    M, T = s * (U - U.mT), xU
    if rest.numel():
        M += s**2 * lower_gram(rest)
        T = xU - s * product(x[:, m:], rest.mT)
    M.diagonal().add_(1)
    LU, pivots = lu_factor(M.mul_(0.5))  # for 256 rows of 512, solving takes less than an inverse and two products
    z: Tensor = torch.linalg.lu_solve(LU, pivots, T.mT).mT
    return z - xU, (z, norm, LU, pivots)


def _cayley_linear_gradients(
    grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...]
) -> Tensors:
    (x, V, g), (z, norm, LU, pivots) = inputs, kept
    m, s = len(V), g / norm
    rest = dense(V[:, m:])
    v = torch.linalg.lu_solve(LU, pivots, grad.mT, adjoint=True).mT
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.sub(v, grad, out=gx[:, :m])
    torch.mul(product(v, rest), -s, out=gx[:, m:])
    vz, gW = product(v.mT, z), torch.empty_like(V, memory_format=torch.contiguous_format)
    torch.sub(vz.mT, vz, out=gW[:, :m]).mul_(0.5)
    if 2 * len(x) < m:  # the gradient of M has low rank
        right = torch.cat((x[:, m:] + product(z, rest).mul_(0.5 * s), gx[:, m:].mul(-0.5)))
        torch.neg(product(torch.cat((v, z)).mT, right), out=gW[:, m:])
    elif rest.numel():
        gW[:, m:] = product(v.mT, x[:, m:])
        gW[:, m:].add_(product((vz + vz.mT).mul_(0.5 * s), rest)).neg_()
    return gx, *weight_norm_gradients(gW, V, g, norm)
