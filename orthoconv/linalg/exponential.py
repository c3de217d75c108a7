"""Exponentials of skew matrices."""

__all__ = ["exponential_terms", "skew_exponential"]

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.linalg.nearest import bjorck_step

_HALVINGS = 16  # on an accelerator, which is not asked for the norm: enough for norms up to 2^15


def skew_exponential(W: Tensor) -> Tensor:
    r"""Orthogonal matrix :math:`\exp(A)` of :math:`A = (W - W^*) / 2`, for any square `W`.

    The norm of A is halved until it is at most 1/2. Taylor's series gives the exponential of that, which is squared as
    often. Steps of Bjorck's iteration remove the rounding errors. The gradient is

    .. math:: \varphi(\mathrm{ad}_A)(X^* G), \qquad \varphi(z) = (e^z - 1) / z, \qquad \mathrm{ad}_A B = A B - B A,

    of X = exp(A) and its gradient G, by the same series and halvings. Each term is one product.

    An accelerator takes 16 halvings whatever the norm, so that the host need not wait for it. The result is as
    accurate, since the squarings carry exp(A) - I, whose small entries keep their digits. A matrix W with a Frobenius
    norm above 2^15 is first scaled down to that norm.

    Arguments:
        W: Real or complex matrices, of shape (..., n, n).

    >>> Q = skew_exponential(torch.randn(5, 5, dtype=torch.float64))
    >>> torch.dist(Q.mT @ Q, torch.eye(5)).item() < 1e-14
    True
    """
    if not budget.has_cache(W.device):
        norm = torch.linalg.matrix_norm(W.detach(), keepdim=True)
        W = W * (2 ** (_HALVINGS - 1) / norm).clamp_max(1)
    return with_gradient((W,), _skew_exponential, _skew_exponential_forward, _skew_exponential_gradients)


def exponential_terms(A: Tensor, terms: int) -> Tensor:
    r"""Taylor's polynomial of the exponential, :math:`\sum_{k=0}^m A^k / k!`, by about 2 sqrt(m) products.

    The powers up to s, near sqrt(m), make polynomials of degree s - 1, the coefficients of one in A^s (Paterson and
    Stockmeyer, 1973).

    Arguments:
        A: Real or complex matrices, of shape (..., n, n).
        terms: Degree m, at least 1.

    >>> exponential_terms(torch.ones(1, 1), 2)
    tensor([[2.5000]])
    """
    s = round(math.sqrt(terms))
    powers = list(accumulate([A] * s, torch.matmul))  # A, ..., A^s
    I = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)  # noqa: E741

    def part(first: int, last: int) -> Tensor:
        """A^k / k! for k from first to last, divided by A^first."""
        scaled = (B * (1 / math.factorial(k)) for k, B in zip(range(first + 1, last + 1), powers, strict=False))
        return sum(scaled, I * (1 / math.factorial(first)))

    firsts = range(0, terms, s)
    X = part(firsts[-1], terms)
    for first in reversed(firsts[:-1]):
        X = part(first, first + s - 1) + X @ powers[-1]
    return X


def _skew_exponential(W: Tensor) -> Tensor:
    return bjorck_step(bjorck_step(torch.linalg.matrix_exp(0.5 * (W - W.mH))))


def _skew_exponential_forward(W: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    A = 0.5 * (W - W.mH)
    if not budget.has_cache(A.device):
        return _fixed_halvings(A)
    A2 = A @ A
    norm = math.sqrt(float(torch.linalg.matrix_norm(A2).max())) if A.numel() else 0.0  # of a normal A: |A|^2 = |A^2|
    halvings = max(0, math.frexp(2 * norm)[1]) if math.isfinite(norm) else 0
    A = A * 0.5**halvings
    powers = [_exponential_series(A, A2 * 0.25**halvings)]
    for k in range(1, halvings + 1):
        X = powers[-1] @ powers[-1]
        powers.append(X if k % 8 else bjorck_step(X))
    X = bjorck_step(powers.pop())
    return X, (X, A, *powers)


def _fixed_halvings(A: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same for skew matrices of norm up to 2^15, by a fixed number of halvings."""
    I = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)  # noqa: E741
    A = A * 0.5**_HALVINGS
    E, powers = _exponential_series(A, A @ A, first=0), []
    for k in range(1, _HALVINGS + 1):
        powers.append(E + I)
        E = 2 * E + E @ E  # (I + E)^2 - I
        if k % 8 == 0:
            R = E + E.mH + E.mH @ E  # X* X - I for X = I + E
            E = E - 0.5 * (R + E @ R)
    X = bjorck_step(E + I)
    return X, (X, A, *powers)


def _exponential_series(A: Tensor, A2: Tensor, first: float = 1) -> Tensor:
    """exp(A) for matrices of norm at most 1/2, and their squares: cubes of A times polynomials of degree two.

    `first` takes the place of the first term, I: zero for exp(A) - I.
    """
    terms = 15 if torch.finfo(A.dtype).eps < 1e-10 else 9
    c = [first, *(1 / math.factorial(k) for k in range(1, terms))]
    I, A3 = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A2 @ A  # noqa: E741
    X = c[-3] * I + c[-2] * A + c[-1] * A2
    for k in range(terms - 6, -1, -3):
        X = torch.add(A3 @ X, A2, alpha=c[k + 2]).add_(A, alpha=c[k + 1]).add_(I, alpha=c[k])
    return X


def _skew_exponential_gradients(
    grad: Tensor, needed: Sequence[bool], inputs: object, kept: tuple[Tensor, ...]
) -> Tensors:
    X, A, *powers = kept
    S = X.mH @ grad
    S = 0.5 * (S - S.mH)  # only this part belongs to a skew A, and all the terms stay skew: A S - S A = A S - (A S)*
    G, terms = S, 18 if torch.finfo(A.dtype).eps < 1e-10 else 11
    for k in range(terms, 1, -1):
        T = A @ G
        G = torch.add(S, T - T.mH, alpha=1 / k)
    for E in powers:
        G = 0.5 * (G + E @ G @ E.mH)
    return (G,)
