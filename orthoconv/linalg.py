"""Orthogonal matrices from unconstrained ones."""

__all__ = [
    "Orthogonalizer",
    "bjorck",
    "cayley",
    "cayley_linear",
    "frobenius_norm",
    "norm_bound",
    "orthogonalizer",
    "polar",
    "row_norms",
    "spectral_norm",
    "weight_norm",
]

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orthoconv.autograd import Tensors, with_gradient
from orthoconv.elimination import inverse
from orthoconv.tracing import is_eager

Orthogonalizer = Callable[[Tensor], Tensor]

_CONDITION = 1e4  # of matrices whose eigenvalues are accurate enough
_EIGEN = 128  # order of matrices from which eigenvalues are faster than iterations
_SMALLEST = 1e-4  # singular value, relative to the largest, that one round of `polar` brings to 1
_SMALLEST_OF_TALL = 0.05  # the same for the first round on tall matrices, which are seldom ill-conditioned
_LARGEST_SCALE = 1.6  # of a step of `polar`: nearer to sqrt 3, rounding errors of the largest values grow too much
_DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def cayley(W: Tensor) -> Tensor:
    r"""Semi-orthogonal matrix of the same shape as `W`, by the Cayley transform.

    With the rows of a tall `W` split into a square `U` and the rest `V` (Appendix A.1),

    .. math:: Q = \begin{bmatrix} (I - A)(I + A)^{-1} \ -2 V (I + A)^{-1} \end{bmatrix},
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
    A = U - U.mH if m == n else U - U.mH + V.mH @ V  # inductor cannot compile an empty complex V
    R = 2 * inverse(I + A)
    return R - I if m == n else torch.cat((R - I, -V @ R), dim=-2)


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
    m, s = len(V), weight_scale(V, g)
    xU, (U, rest) = x[:, :m], (V[:, :m], V[:, m:])
    M = s * (U - U.mT) + torch.eye(m, dtype=V.dtype, device=V.device)
    T = xU
    if rest.numel():
        M = M + s**2 * _gram(rest)
        T = xU - s * (x[:, m:] @ rest.mT)
    factors = torch.linalg.lu_factor(M.mul_(0.5))
    z: Tensor = torch.linalg.lu_solve(*factors, T.mT).mT
    return z - xU, (z, *factors)


def _cayley_linear_gradients(
    grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...]
) -> Tensors:
    (x, V, g), (z, *factors) = inputs, kept
    m, s = len(V), weight_scale(V, g)
    rest = V[:, m:]
    v = torch.linalg.lu_solve(*factors, grad.mT, adjoint=True).mT
    gx = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.sub(v, grad, out=gx[:, :m])
    torch.mm(v, rest, out=gx[:, m:]).mul_(-s)
    vz, gW = v.mT @ z, torch.empty_like(V, memory_format=torch.contiguous_format)
    torch.sub(vz.mT, vz, out=gW[:, :m]).mul_(0.5)
    if 2 * len(x) < m:  # the gradient of M has low rank
        right = torch.cat((torch.addmm(x[:, m:], z, rest.mul(0.5 * s)), gx[:, m:].mul(-0.5)))
        torch.mm(-torch.cat((v, z)).mT, right, out=gW[:, m:])
    elif rest.numel():
        torch.mm(v.mT, x[:, m:], out=gW[:, m:])
        gW[:, m:].addmm_((vz + vz.mT).mul_(0.5 * s), rest, beta=-1, alpha=-1)
    return gx, *weight_norm_gradients(gW, V, g)


def weight_norm(V: Tensor, g: Tensor) -> Tensor:
    """Return g V / |V| (Section 4.1), zero where V is zero; its gradient takes few passes over V."""

    def ordinary(V: Tensor, g: Tensor) -> Tensor:
        return V * weight_scale(V, g)

    def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
        return weight_norm_gradients(grad.clone(), *inputs)

    return with_gradient((V, g), ordinary, lambda V, g: (ordinary(V, g), ()), backward)


def weight_scale(V: Tensor, g: Tensor) -> Tensor:
    """Return g / |V|, the factor that gives V the norm g (Section 4.1); zero where V is zero."""
    return torch.div(g, torch.linalg.vector_norm(V).clamp_min(1e-12))


def weight_norm_gradients(grad: Tensor, V: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of V and g from that of g V / |V|, which is overwritten."""
    norm = torch.linalg.vector_norm(V).clamp_min(1e-12)
    along = torch.dot(grad.reshape(-1), V.reshape(-1)) / norm
    return grad.mul_(g / norm).addcmul_(V, -along * g / norm**2), along


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

    Each iterate is W times a polynomial of W* W, which large matrices take from the eigenvalues of W* W, whatever the
    number of iterations, and tall ones from that smaller matrix; the last two iterations are on the iterate itself, and
    correct the rounding errors of the others.

    Arguments:
        W: Real or complex matrices, of shape (..., m, n).
        iterations: Number of iterations.

    >>> Q = bjorck(torch.randn(5, 3, dtype=torch.float64))
    >>> torch.dist(Q.mT @ Q, torch.eye(3)).item() < 1e-12
    True
    """
    if W.shape[-2] < W.shape[-1]:
        return bjorck(W.mT, iterations).mT
    if W.shape[-1] >= _EIGEN and is_eager(W) and W.device.type != "mps":
        fine = W.detach().to(_DOUBLE.get(W.dtype, W.dtype))
        G = fine.mH @ fine
        if bool(torch.isfinite(G).all()):
            values, U = torch.linalg.eigh(G)
            if bool((values[..., 0] > values[..., -1] / _CONDITION**2).all()):
                return _bjorck_by_eigenvalues(W, iterations, values, U)
    return _iterate(W / norm_bound(W.detach())[..., None, None].clamp_min(torch.finfo(W.dtype).tiny), iterations)


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
        X = 1.5 * X - 0.5 * (X @ (X.mH @ X))
    return X


def _bjorck_by_eigenvalues(W: Tensor, iterations: int, values: Tensor, U: Tensor) -> Tensor:
    """`_iterate` on W over its norm as W p(W* W), the polynomial p on the eigenvalues of W* W, in float64."""
    square = values[..., -1:]
    norm, first = square.sqrt()[..., None], max(iterations - 2, 0)

    def ordinary(W: Tensor) -> Tensor:
        return _iterate(W / norm.to(W.real.dtype), iterations)

    def forward(W: Tensor) -> tuple[Tensor, tuple[()]]:
        p, _ = _bjorck_polynomial(values / square, first)
        P = (U * (p[..., None, :] / norm)) @ U.mH
        return _iterate(W @ P.to(W.dtype), iterations - first), ()

    def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
        (W,) = inputs
        p, slopes = _bjorck_polynomial(values / square, iterations)
        S = (W.mH @ grad).to(U.dtype)
        S = U.mH @ S @ U * (slopes / norm**3)  # the gradient of W* W in the basis U (Daleckii and Krein)
        P, S = (U * (p[..., None, :] / norm)) @ U.mH, U @ (S + S.mH) @ U.mH
        return (grad @ P.to(W.dtype) + W @ S.to(W.dtype),)

    return with_gradient((W,), ordinary, forward, backward)


def _bjorck_polynomial(values: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """p with X p(X* X) after so many iterations on X, at `values` (..., n), and its slopes between them (..., n, n).

    >>> _bjorck_polynomial(torch.tensor([0.0, 1.0]), 1)
    (tensor([1.5000, 1.0000]), tensor([[-0.5000, -0.5000],
            [-0.5000, -0.5000]]))
    """
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
    float32) brings all values above 1e-4 to 1; for tall matrices the first round is shorter. Rounds follow until all
    values are there, down to the precision of `W`. Where torch traces or transforms, there are two rounds, enough for
    condition numbers up to 1e8.

    Zero matrices become the identity. A matrix of lower rank that is not zero has no nearest one: its zero singular
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
    norm = norm_bound(W.detach(), 1)[..., None, None]
    zero = norm <= torch.finfo(W.dtype).tiny
    E = torch.eye(m, n, dtype=W.dtype, device=W.device)
    X = torch.where(zero, W + E, W / norm.where(~zero, 1)).reshape(-1, m, n)
    eps, eager = torch.finfo(W.dtype).eps, is_eager(W)
    smallest = _SMALLEST_OF_TALL if eager and m >= 2 * n else _SMALLEST
    for _ in range(math.ceil(math.log(eps, _SMALLEST)) + 1 if eager else 2):
        for r in _polar_scales(smallest, eps):
            X = torch.baddbmm(X, X, X.mH @ X, beta=1.5 * r, alpha=-0.5 * r**3)
        if eager and _is_orthogonal(X.detach(), 20 * math.sqrt(n) * eps):
            break
        smallest = _SMALLEST
    return X.view(W.shape)


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


def _is_orthogonal(X: Tensor, tolerance: float) -> bool:
    """Whether X* X is so near to I, for all matrices X (..., m, n), or not finite."""
    G = X.mH @ X
    G.diagonal(dim1=-2, dim2=-1).sub_(1)
    return not bool((torch.linalg.matrix_norm(G) > tolerance).any())


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


def spectral_norm(D: Tensor) -> float:
    """Largest singular value among matrices (..., m, n), found in float64 and rounded up."""
    D = D.detach().to(torch.complex128 if D.is_complex() else torch.float64)
    D = D if D.shape[-2] >= D.shape[-1] else D.mH
    largest = torch.linalg.eigvalsh(D.mH @ D)[..., -1].max().clamp_min(0).sqrt().item()
    return float(largest * (1 + 10 * max(D.shape[-2:]) * torch.finfo(torch.float64).eps))


def frobenius_norm(x: Tensor) -> float:
    """Square root of the sum of all squares, found in float64."""
    return float(torch.linalg.vector_norm(x.detach().double()))


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
