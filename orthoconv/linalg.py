"""Orthogonal matrices from unconstrained ones."""

__all__ = ["Orthogonalizer", "bjorck", "cayley", "cayley_linear", "norm_bound", "orthogonalizer", "row_norms"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Orthogonalizer = Callable[[Tensor], Tensor]

_DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


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
    if m > n and W.dtype in _DOUBLE and W.device.type != "mps":
        return cayley(W.to(_DOUBLE[W.dtype])).to(W.dtype)  # rounding V*V costs a tall Q its orthogonality
    U, V = W[..., :n, :], W[..., n:, :]
    I = torch.eye(n, dtype=W.dtype, device=W.device)  # noqa: E741
    A = U - U.mH + V.mH @ V
    R = 2 * torch.linalg.inv(I + A)
    return torch.cat((R - I, -V @ R), dim=-2)


def cayley_linear(x: Tensor, W: Tensor, scale: Tensor) -> Tensor:
    r"""Product of each row of `x` with a wide or square ``cayley(scale * W)``, which is never formed.

    With ``scale * W`` = [U, V], and x split into the same columns,

    .. math:: \mathrm{cayley}(W)\, x = M^{-1} (x_U - V x_V) - x_U, \qquad M = (I + U - U^T + V V^T) / 2.

    Nor is its gradient formed: that of M is :math:`-v z^T`, where :math:`z = M^{-1} (x_U - V x_V)` and
    :math:`v = M^{-T}` times the gradient of z. The product V V^T is rounded in the precision of `W`, which `cayley`
    avoids: for weights of large norm with a V of low rank, the two differ.

    Arguments:
        x: Real, of shape (b, n).
        W: Real, of shape (m, n) with m <= n.
        scale: A number.

    >>> x, W = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    >>> torch.dist(cayley_linear(x, W, torch.tensor(2.0)), x @ cayley(2 * W).mT).item() < 1e-13
    True
    """
    y: Tensor = _CayleyLinear.apply(x, W, scale)
    return y


class _CayleyLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, scale: Tensor) -> Tensor:
        m = len(W)
        xU, (U, V) = x[:, :m], (W[:, :m], W[:, m:])
        M = 0.5 * (scale * (U - U.mT) + torch.eye(m, dtype=W.dtype, device=W.device))
        T = xU
        if V.numel():
            M = M + 0.5 * scale**2 * _gram(V)
            T = xU - scale * (x[:, m:] @ V.mT)
        factors = torch.linalg.lu_factor(M)
        z: Tensor = torch.linalg.lu_solve(*factors, T.mT).mT
        ctx.save_for_backward(x, W, scale, z, *factors)
        return z - xU

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, W, scale, z, *factors = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the ordinary way
            needed = [t for t, wanted in zip((x, W, scale), ctx.needs_input_grad, strict=True) if wanted]
            found = iter(torch.autograd.grad(x @ cayley(scale * W).mT, needed, grad, create_graph=True))
            return tuple(next(found) if wanted else None for wanted in ctx.needs_input_grad)
        m = len(W)
        V = W[:, m:]
        v = torch.linalg.lu_solve(*factors, grad.mT, adjoint=True).mT
        vV = v @ V
        gx = torch.cat((v - grad, -scale * vV), dim=1) if ctx.needs_input_grad[0] else None
        gM = v.mT @ z
        gW = torch.empty_like(W)
        torch.sub(gM.mT, gM, out=gW[:, :m]).mul_(0.5)
        if not V.numel():
            pass
        elif 2 * len(x) < m:  # the gradient of M has low rank
            gW[:, m:] = torch.cat((v, z)).mT @ torch.cat((-x[:, m:] - 0.5 * scale * (z @ V), -0.5 * scale * vV))
        else:
            gW[:, m:] = torch.addmm(v.mT @ x[:, m:], 0.5 * scale * (gM + gM.mT), V).neg_()
        return gx, gW.mul(scale), torch.dot(gW.flatten(), W.flatten())


def _gram(V: Tensor) -> Tensor:
    """V V^T, of which blocks above the diagonal are not computed."""
    m = len(V)
    if m < 256:
        return V @ V.mT
    k = m // 2
    below = V[k:] @ V[:k].mT
    return torch.cat((torch.cat((_gram(V[:k]), below.mT), dim=1), torch.cat((below, _gram(V[k:])), dim=1)))


def bjorck(W: Tensor, iterations: int = 20) -> Tensor:
    r"""Semi-orthogonal matrix nearest to `W`, by the iteration of Bjorck and Bowie (1971).

    .. math:: X \leftarrow X + \tfrac12 X (I - X^* X)

    moves each singular value towards 1, from anywhere in (0, sqrt 3); `W` is first divided by an upper bound of its
    norm. Small values grow by half in each iteration, so 20 of them reach 1 within 1e-5 where the condition number
    of `W` is below 500. No value ends above 1.

    Each iterate of a tall `W` is W times a polynomial of W* W, and is found from that smaller matrix; the last two
    iterations are on the iterate itself, and correct the rounding errors of the others.

    Arguments:
        W: Real or complex matrices, of shape (..., m, n).
        iterations: Number of iterations.

    >>> Q = bjorck(torch.randn(5, 3, dtype=torch.float64))
    >>> torch.dist(Q.mT @ Q, torch.eye(3)).item() < 1e-12
    True
    """
    if W.shape[-2] < W.shape[-1]:
        return bjorck(W.mT, iterations).mT
    X = W / norm_bound(W.detach())[..., None, None].clamp_min(torch.finfo(W.dtype).tiny)
    m, n = X.shape[-2:]
    direct = min(iterations, 2) if m >= 4 * n else iterations
    if direct < iterations:
        X = X @ _bjorck_polynomial(X.mH @ X, iterations - direct)
    for _ in range(direct):
        X = 1.5 * X - 0.5 * (X @ (X.mH @ X))
    return X


def _bjorck_polynomial(G: Tensor, iterations: int) -> Tensor:
    """P such that so many iterations of `bjorck` on X, with X* X = G, yield X P."""
    I = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)  # noqa: E741
    P = F = 1.5 * I - 0.5 * G
    for _ in range(iterations - 1):
        G = F @ G @ F
        F = 1.5 * I - 0.5 * G
        P = P @ F
    return P


def norm_bound(W: Tensor, squarings: int = 3) -> Tensor:
    r"""Upper bound of the spectral norm of `W` (..., m, n), too large by n^(1/32) at the most.

    It is the power iteration from every vector at once: :math:`\|G^{p}\|_F^{1/2p}` with :math:`G = W^* W` and p a power
    of 2, found by squaring. An iterate from one vector would be a lower bound, and prove nothing.

    >>> norm_bound(torch.eye(2)) >= 1
    tensor(True)
    """
    if W.shape[-2] < W.shape[-1]:
        W = W.mH
    if W.shape[-1] == 0:
        return W.new_zeros(W.shape[:-2])
    scale = W.abs().amax((-2, -1), keepdim=True)
    G = W / scale.where(scale > 0, 1)
    G, bound, root = G.mH @ G, scale, 2
    for k in range(squarings + 1):
        G = G @ G if k else G
        norm = torch.linalg.matrix_norm(G, keepdim=True).clamp_min(torch.finfo(W.dtype).tiny)
        G, bound, root = G / norm, bound * norm ** (1 / root), 2 * root
    return bound[..., 0, 0]


def orthogonalizer(name: str) -> Orthogonalizer:
    """The function called `name`: "bjorck" or "cayley"."""
    functions: dict[str, Orthogonalizer] = {"bjorck": bjorck, "cayley": cayley}
    if name not in functions:
        raise ValueError(f"orthogonalizer must be one of {', '.join(map(repr, functions))}, got {name!r}")
    return functions[name]


def row_norms(x: Tensor) -> Tensor:
    """Norm of each example of a batch (b, ...)."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms
