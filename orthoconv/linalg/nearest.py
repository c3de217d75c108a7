# mypy: disable-error-code="no-any-return"
"""The orthogonal matrix nearest to a given one: iterations of Bjorck, and the polar factor."""

from __future__ import annotations

__all__ = ["bjorck", "bjorck_linear", "bjorck_step", "polar", "polar_linear"]

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.linalg.norms import DOUBLE, lower_gram, norm_bound
from orthoconv.products import product
from orthoconv.tracing import full_precision, is_eager

_CONDITION = 1e4  # of matrices whose eigenvalues in float64 are accurate enough for float32
_CONDITION_UNFORMED = 100.0  # up to which products with W and P are those with W P to 3e-5 in float32
_EIGEN = 128  # order of matrices from which eigenvalues are faster than iterations
_SMALLEST = 1e-4  # singular value, relative to the largest, that one round of `polar` brings to 1
_SMALLEST_OF_TALL = 0.05  # the same for the first round on tall matrices, which are seldom ill-conditioned
_CONVERGED = 1e-8  # distance of squares from 1 after which one more step of `bjorck` brings them there in float64
_LARGEST_SCALE = 1.6  # of a step of `polar`: nearer to sqrt 3, rounding errors of the largest values grow too much


def bjorck(W: Tensor, iterations: int = 20) -> Tensor:
    r"""Semi-orthogonal matrix nearest to `W`, by the iteration of Bjorck and Bowie (1971).

    .. math:: X \leftarrow X + \tfrac12 X (I - X^* X)

    moves each singular value towards 1, from anywhere in (0, sqrt 3); `W` is first divided by an upper bound of its
    norm. Small values grow by half in each iteration, so 20 of them reach 1 within 1e-5 where the condition number
    of `W` is below 500. No value ends above 1.

    Each iterate is W times a polynomial of W* W. Large matrices in float32 take it from the eigenvalues of W* W in
    float64, whatever the number of iterations. Tall ones take it from the smaller matrix W* W, and do the last two
    iterations on the iterate itself, which corrects the rounding errors of the others.

    Arguments:
        W: Real or complex matrices, of shape (..., m, n).
        iterations: Number of iterations.

    >>> Q = bjorck(torch.randn(5, 3, dtype=torch.float64))
    >>> torch.dist(Q.mT @ Q, torch.eye(3)).item() < 1e-12
    True
    """
    if W.shape[-2] < W.shape[-1]:
        return bjorck(W.mT, iterations).mT
    iterate = partial(_iterate, iterations=iterations)
    polynomial = partial(_bjorck_polynomial, iterations=iterations)
    return _nearest(W, polynomial, iterate, lambda W: iterate(_divided_by_norm(W)))


def bjorck_linear(x: Tensor, W: Tensor, iterations: int = 20) -> Tensor:
    """Multiply rows by Q* for Q = bjorck(W, iterations), without forming Q where that is faster.

    A tall W has Q = W P, and a wide one Q = P W, with a small symmetric matrix P. For few rows, multiplying by W and by
    P takes fewer operations than forming Q. P makes rounding errors larger where W is ill-conditioned. There, Q is
    formed.

    Arguments:
        x: Rows, of shape (..., n).
        W: Real matrix, of shape (m, n).
        iterations: Number of iterations.

    >>> x, W = torch.randn(2, 256), torch.randn(128, 256)
    >>> torch.dist(bjorck_linear(x, W), x @ bjorck(W).mT).item() < 1e-4
    True
    """
    iterate = partial(_iterate, iterations=iterations)
    polynomial = partial(_bjorck_polynomial, iterations=iterations)
    return _linear(x, W, polynomial, iterate, lambda W: iterate(_divided_by_norm(W)))


def _divided_by_norm(W: Tensor) -> Tensor:
    return W / norm_bound(W.detach())[..., None, None].clamp_min(torch.finfo(W.dtype).tiny)


def _iterate(X: Tensor, iterations: int) -> Tensor:
    """So many iterations of `bjorck`."""
    m, n = X.shape[-2:]
    direct = min(iterations, 2) if m >= 4 * n else iterations
    if direct < iterations:
        I = torch.eye(n, dtype=X.dtype, device=X.device)  # noqa: E741
        G = X.mH @ X
        P = F = 1.5 * I - 0.5 * G
        for _ in range(iterations - direct - 1):
            G = F @ G @ F
            F = 1.5 * I - 0.5 * G
            P = P @ F
        X = X @ P
    for _ in range(direct):
        X = bjorck_step(X)
    return X


def bjorck_step(X: Tensor) -> Tensor:
    """One iteration of `bjorck`, without the division by the norm; it squares the error of a nearly orthogonal X."""
    return 1.5 * X - 0.5 * (X @ (X.mH @ X))


def _nearest(
    W: Tensor,
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    iterate: Callable[[Tensor], Tensor],
    by_steps: Callable[[Tensor], Tensor],
) -> Tensor:
    """Matrices near to W (..., m, n), m >= n: by the eigenvalues of W* W where these will do, by steps elsewhere.

    `function` and `iterate` are those of `_by_eigenvalues`.
    """
    if (spectrum := _eigenvalues_of_gram(W)) is None:
        return by_steps(W)
    values, U = spectrum
    accurate = _are_accurate(values)
    if bool(accurate.all()):
        return _by_eigenvalues(W, values, U, function, iterate)
    if not bool(accurate.any()):
        return by_steps(W)
    X, values, U = W.flatten(0, -3), values.flatten(0, -2), U.flatten(0, -3)
    some, rest = (mask.flatten().nonzero()[:, 0] for mask in (accurate, ~accurate))
    Q = torch.zeros_like(X).index_copy(0, some, _by_eigenvalues(X[some], values[some], U[some], function, iterate))
    return Q.index_copy(0, rest, by_steps(X[rest])).view(W.shape)


def _are_accurate(values: Tensor) -> Tensor:
    """Whether eigenvalues (..., n) of W* W in float64 are accurate enough for float32."""
    return values[..., 0] > values[..., -1] / _CONDITION**2


def _eigenvalues_of_gram(W: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues and vectors of W* W in float64, where they are faster than iterations in float32."""
    if W.shape[-1] < _EIGEN or W.dtype not in DOUBLE or not is_eager(W) or not budget.has_cache(W.device):
        return None
    G = lower_gram(W.detach().to(DOUBLE[W.dtype]).mH)
    if not bool(torch.isfinite(G).all()):
        return None
    values, U = torch.linalg.eigh(G)
    return values, U


def _by_eigenvalues(
    W: Tensor,
    values: Tensor,
    U: Tensor,
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    iterate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return V f(V* V) for V = W / |W|, from the eigenvalues and vectors U of W* W in float64.

    `function` returns f at numbers (..., n), and its slopes between them (..., n, n). `iterate` is V f(V* V) in
    differentiable steps, for second derivatives.
    """
    square = values[..., -1:]
    norm = square.sqrt()[..., None]

    def ordinary(W: Tensor) -> Tensor:
        return iterate(W / norm.to(W.real.dtype))

    def forward(W: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        f, slopes = function(values / square)
        P = (U * (f[..., None, :] / norm)) @ U.mH
        return (W.to(P.dtype) @ P).to(W.dtype), (P.to(W.dtype), slopes / norm**3)

    def backward(
        grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, Tensor]
    ) -> Tensors:
        (W,), (P, slopes) = inputs, kept
        return (product(grad, P) + product(W, _gradient_of_gram(product(W.mH, grad), U, slopes)),)

    return with_gradient((W,), ordinary, forward, backward)


def _linear(
    x: Tensor,
    W: Tensor,
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    iterate: Callable[[Tensor], Tensor],
    by_steps: Callable[[Tensor], Tensor],
) -> Tensor:
    """Multiply rows by Q* for the orthogonal matrix Q nearest to W, which is formed only if it must be.

    Q goes by the eigenvalues of the smaller Gram matrix of W, or by steps where those are not accurate or not faster.
    """
    wide = W.shape[0] < W.shape[1]  # as in `bjorck` and `polar`: a singular W and its transpose are rounded otherwise
    V = W.mT if wide else W
    with full_precision(x):
        if (spectrum := _eigenvalues_of_gram(V)) is None or not bool(_are_accurate(spectrum[0])):
            Q = by_steps(V)
        elif x.numel() > W.shape[1] * len(V) or bool(spectrum[0][0] < spectrum[0][-1] / _CONDITION_UNFORMED**2):
            Q = _by_eigenvalues(V, *spectrum, function, iterate)
        else:
            P = _root_by_eigenvalues(V, *spectrum, function, iterate)
            return product(product(x, W.T), P) if wide else product(product(x, P), W.T)
        return product(x, Q if wide else Q.T)


def _root_by_eigenvalues(
    W: Tensor,
    values: Tensor,
    U: Tensor,
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    iterate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return P such that `_by_eigenvalues` of the same arguments is W P."""
    square = values[..., -1:]
    norm = square.sqrt()[..., None]

    def ordinary(W: Tensor) -> Tensor:
        fine = W.to(U.dtype)
        P: Tensor = torch.linalg.solve(fine.mH @ fine, fine.mH @ iterate(fine / norm))
        return P.to(W.dtype)

    def forward(W: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        f, slopes = function(values / square)
        return ((U * (f[..., None, :] / norm)) @ U.mH).to(W.dtype), (U.to(W.dtype), slopes.to(W.dtype))

    def backward(
        grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, Tensor]
    ) -> Tensors:
        factor = float(norm) ** -1.5  # its square may leave the range of float32
        S = _gradient_of_gram(grad, *kept).mul_(factor).mul_(factor)
        return (product(S, inputs[0].mH).mH,)  # W S, laid out as W is: W is mostly the transpose of a weight

    return with_gradient((W,), ordinary, forward, backward)


def _gradient_of_gram(grad: Tensor, U: Tensor, slopes: Tensor) -> Tensor:
    """Twice the Hermitian part of the gradient of W* W = U diag(.) U*, from that of a function of it.

    Daleckii and Krein: in the basis U, the gradient is multiplied by the slopes of the function between eigenvalues.
    """
    S = product(product(U.mH, grad.to(U.dtype)), U) * slopes
    S = product(product(U, S + S.mH), U.mH)
    return S.to(grad.dtype)


def _bjorck_polynomial(values: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """p with X p(X* X) after so many iterations on X, at `values` (..., n), and its slopes between them (..., n, n).

    >>> _bjorck_polynomial(torch.tensor([0.0, 1.0]), 1)
    (tensor([1.5000, 1.0000]), tensor([[-0.5000, -0.5000],
            [-0.5000, -0.5000]]))
    """
    g = reduce(lambda g, _: g * (1.5 - 0.5 * g) ** 2, range(iterations - 1), values)
    if iterations and bool(((g - 1).abs() < _CONVERGED).all()):
        return _inverse_root(values)  # where it converges to
    g, p = values, torch.ones_like(values)
    dg = torch.ones_like(values[..., None] * values[..., None, :])
    dp = torch.zeros_like(dg)
    for _ in range(iterations):
        F, dF = 1.5 - 0.5 * g, -0.5 * dg
        row, column = F[..., None], F[..., None, :]
        dp = dp * row + p[..., None, :] * dF  # the slope of a product: (f h)' = f' h + f h'
        dg = dg * row**2 + g[..., None, :] * dF * (row + column)
        g, p = g * F**2, p * F
    return p, dp


def polar(W: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix nearest to `W`: its polar factor :math:`W (W^* W)^{-1/2}`, to the last digits.

    .. math:: X \leftarrow \tfrac12 \rho X (3 I - \rho^2 X^* X), \qquad \rho^2 = 3 / (1 + l + l^2),

    is Bjorck's iteration, scaled by the best factor for singular values in [l, 1] (Chen and Chow, A stable scaling of
    Newton-Schulz, 2014; the cubic case of CANS and Polar Express). No value ever exceeds 1. A round of 15 steps (14 in
    float32) brings all values above 1e-4 to 1; for tall matrices the first round is shorter. Further rounds take the
    matrices with values that are not there yet, down to the precision of `W`. Where torch traces or transforms, there
    are two rounds, enough for condition numbers up to 1e8.

    Zero matrices become the identity. A matrix of lower rank that is not zero has many nearest ones: its zero singular
    values stay zero, or what rounding has made of them becomes 1. Derivatives grow with the condition number.

    Arguments:
        W: Real or complex matrices, of shape (..., m, n).

    >>> Q = polar(torch.randn(5, 3, dtype=torch.float64))
    >>> torch.dist(Q.mT @ Q, torch.eye(3)).item() < 1e-14
    True
    """
    m, n = W.shape[-2:]
    if m < n:
        return polar(W.mT).mT
    return _nearest(W, _inverse_root, _polar_iteration, _polar_by_steps)


def polar_linear(x: Tensor, W: Tensor) -> Tensor:
    """Multiply rows by Q* for Q = polar(W), without forming Q where that is faster; see `bjorck_linear`.

    Arguments:
        x: Rows, of shape (..., n).
        W: Real matrix, of shape (m, n).

    >>> x, W = torch.randn(2, 256), torch.randn(128, 256)
    >>> torch.dist(polar_linear(x, W), x @ polar(W).mT).item() < 1e-4
    True
    """
    return _linear(x, W, _inverse_root, _polar_iteration, _polar_by_steps)


def _polar_by_steps(W: Tensor) -> Tensor:
    """`polar` of W (..., m, n), m >= n, without eigenvalues."""
    if W.numel() == 0:
        return W
    norm = norm_bound(W.detach(), 1)[..., None, None]
    zero = norm <= torch.finfo(W.dtype).tiny
    E = torch.eye(*W.shape[-2:], dtype=W.dtype, device=W.device)
    return _polar_iteration(torch.where(zero, W + E, W / norm.where(~zero, 1)))


def _inverse_root(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values^(-1/2), and its slopes between them."""
    roots = values.sqrt()
    row, column = roots[..., None], roots[..., None, :]
    return 1 / roots, -1 / (row * column * (row + column))


def _polar_iteration(W: Tensor) -> Tensor:
    """`polar` of W (..., m, n) of norm at most 1."""
    m, n = W.shape[-2:]
    X, eps, looks = W.reshape(-1, m, n), torch.finfo(W.dtype).eps, is_eager(W) and budget.has_cache(W.device)
    later = _polar_scales(_SMALLEST, eps)
    first = _polar_scales(_SMALLEST_OF_TALL, eps) if looks and m >= 2 * n else later
    X = _newton_schulz(X, first)
    if not looks:
        return _newton_schulz(X, later).view(W.shape)
    for _ in range(math.ceil(math.log(eps, _SMALLEST))):
        rest = _far_from_orthogonal(X.detach(), 20 * math.sqrt(n) * eps)
        if len(rest) == 0:
            break
        X = _newton_schulz(X, later) if len(rest) == len(X) else X.index_copy(0, rest, _newton_schulz(X[rest], later))
    return X.view(W.shape)


def _newton_schulz(X: Tensor, scales: Sequence[float]) -> Tensor:
    """Steps of `polar` with these factors, for X (f, m, n); the gradient keeps each X and nothing else."""

    def step(X: Tensor, r: float) -> Tensor:
        return torch.baddbmm(X, X, X.mH @ X, beta=1.5 * r, alpha=-0.5 * r**3)

    def forward(X: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        iterates = list(accumulate(scales, step, initial=X))
        return iterates[-1], tuple(iterates[:-1])

    def backward(grad: Tensor, needed: Sequence[bool], inputs: object, kept: tuple[Tensor, ...]) -> Tensors:
        for X, r in zip(reversed(kept), reversed(scales), strict=True):
            S = X.mH @ grad
            grad = torch.baddbmm(grad, grad, X.mH @ X, beta=1.5 * r, alpha=-0.5 * r**3)
            grad = torch.baddbmm(grad, X, S + S.mH, alpha=-0.5 * r**3)
        return (grad,)

    return with_gradient((X,), lambda X: reduce(step, scales, X), forward, backward)


def _polar_scales(smallest: float, eps: float) -> list[float]:
    """Factors of the steps that bring values in [smallest, 1] to 1, up to `eps`.

    >>> len(_polar_scales(1e-4, 1e-16)), len(_polar_scales(0.5, 1e-16))
    (15, 5)
    """
    scales = []
    while 1 - smallest > eps:
        r = min(math.sqrt(3 / (1 + smallest + smallest**2)), _LARGEST_SCALE)
        scales.append(r)
        smallest = min(r * x * (3 - (r * x) ** 2) / 2 for x in (smallest, 1))
    return scales


def _far_from_orthogonal(X: Tensor, tolerance: float) -> Tensor:
    """Indices of the matrices X (f, m, n) whose X* X is not so near to I; those that are not finite are left out."""
    G = X.mH @ X
    G.diagonal(dim1=-2, dim2=-1).sub_(1)
    return (torch.linalg.matrix_norm(G) > tolerance).nonzero()[:, 0]
