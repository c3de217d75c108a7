"""Orthogonal rows by the Cholesky factorisation.

Hu, Leino, Wang and Fredrikson, A Recipe for Improved Certifiable Robustness, ICLR 2024.
"""

__all__ = ["CholeskyLinear"]

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from orthoconv.autograd import Tensors, with_gradient
from orthoconv.elimination import cholesky
from orthoconv.nn.arguments import Pair
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method


class CholeskyLinear(BaseLinear):
    r"""Linear layer whose rows, or columns if they are fewer, are orthogonal but for a small ridge.

    .. math:: L^{-1} X, \qquad L L^T = X X^T + r \, \bar d \, I

    X is the weight, transposed if it is tall, and d the mean of the diagonal of X X^T. A singular value s of X becomes
    s / sqrt(s^2 + r d), which is less than 1. The ridge r also absorbs the rounding of the factorisation, so that the
    norm is at most 1 for every weight, of any rank.

    Arguments are those of `nn.Linear`, and

        ridge: The ridge r, from 1e-4 to 1.

    Shape:
        (..., in_features), to (..., out_features).

    >>> 0.999 < CholeskyLinear(512, 10).lipschitz() <= 1
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def set_up(self, *, ridge: float = 1e-3) -> None:
        if isinstance(ridge, bool) or not isinstance(ridge, int | float) or not 1e-4 <= ridge <= 1:
            raise ValueError(f"ridge must be from 1e-4 to 1, got {ridge!r}")
        self.ridge = float(ridge)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        (W,) = sources
        return _whitened(W, self.ridge) if W.shape[0] <= W.shape[1] else _whitened(W.mT, self.ridge).mT


def _whitened(X: Tensor, ridge: float) -> Tensor:
    """L^-1 X for a wide X."""
    norm = torch.linalg.vector_norm(X)
    X = X * (math.sqrt(len(X)) / norm.where(norm > 0, 1))  # the mean of the diagonal of X X^T is 1
    forward = partial(_factor, ridge=ridge)
    return with_gradient((X,), lambda X: forward(X)[0], forward, _gradient)


def _factor(X: Tensor, ridge: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """W = L^-1 X, and what its gradient needs: W and L^-1, which costs less to find than it saves."""
    eye = torch.eye(len(X), dtype=X.dtype, device=X.device)
    inverse = torch.linalg.solve_triangular(cholesky(X @ X.mT + ridge * eye), eye, upper=False)
    W = inverse @ X
    return W, (W, inverse)


def _gradient(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> Tensors:
    """L^-T (grad - (T + T^T) W), where T is the lower triangle of grad W^T with half the diagonal.

    It is the adjoint of dW = L^-1 dX - T(L^-1 dS L^-T) W, where dS = dX X^T + X dX^T.
    """
    W, inverse = kept
    T = (grad @ W.mT).tril()
    symmetric = T.tril(-1) + T.mT
    return (inverse.mT @ (grad - symmetric @ W),)


register_method("cholesky", linear=CholeskyLinear)
