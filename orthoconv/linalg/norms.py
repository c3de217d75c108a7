"""Norms and their bounds, Gram matrices, and weights of a given norm."""

from __future__ import annotations

__all__ = [
    "DOUBLE",
    "frobenius_norm",
    "gram",
    "gram_factor",
    "lower_gram",
    "norm_bound",
    "positive_norm",
    "row_norms",
    "spectral_norm",
    "weight_norm",
    "weight_norm_gradients",
    "weight_scale",
    "without_noise",
]

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.products import is_faster, product

DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_MOST_CONDITION = 50.0  # of Cholesky factors, for float32 to be enough


def norm_bound(W: Tensor, squarings: int = 3) -> Tensor:
    r"""Upper bound of the spectral norm of `W` (..., m, n), too large by n^(1/32) at the most.

    It is the power iteration from every vector at once: :math:`\|G^{p}\|_F^{1/2p}` with :math:`G = W^* W` and p a power
    of 2, found by squaring. An iterate from one vector would be a lower bound, and prove nothing.

    Arguments:
        W: Matrices (..., m, n).
        squarings: How often the Gram matrix is squared; more make the bound tighter.

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
    """Largest singular value among matrices (..., m, n), found in float64 and rounded up, at any scale.

    Arguments:
        D: Matrices (..., m, n), real or complex.

    >>> spectral_norm(torch.tensor([[1e-200]], dtype=torch.float64)) >= 1e-200
    True
    """
    D = D.detach().to(torch.complex128 if D.is_complex() else torch.float64)
    D, scale = _scaled(D if D.shape[-2] >= D.shape[-1] else D.mH)
    info, n = torch.finfo(torch.float64), max(D.shape[-2:])
    if not 0 < scale < math.inf:
        return scale
    largest = torch.linalg.eigvalsh(D.mH @ D)[..., -1].max().clamp_min(0).sqrt().item()
    return float(largest * (1 + 10 * n * info.eps) * scale + n * info.tiny)  # a spectrum so small has lost its digits


def frobenius_norm(x: Tensor) -> float:
    """Square root of the sum of all squares, found in float64, at any scale.

    Arguments:
        x: Tensor of any shape.

    >>> frobenius_norm(torch.full((4,), 1e-200, dtype=torch.float64))
    2e-200
    """
    x, scale = _scaled(x.detach().double())
    return float(torch.linalg.vector_norm(x)) * scale if 0 < scale < math.inf else scale


def _scaled(x: Tensor) -> tuple[Tensor, float]:
    """Divide `x` by the power of 2 next to its largest entry, and return both; squares then do not vanish.

    Nothing is divided where that power would be 0, infinite or NaN, which is returned for it.
    """
    entries = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    largest = float(entries.abs().max()) if x.numel() else 0.0
    if not 0 < largest < math.inf:
        return x, largest
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1)
    entries = entries / scale  # real ones: torch divides complex numbers by way of 1 / scale, which may be infinite
    return torch.view_as_complex(entries) if x.is_complex() else entries, scale


def without_noise(W: Tensor) -> Tensor:
    """Set columns of W (f, ..., o, i) to zero that are only rounding of the largest ones of their place, over all f.

    At a frequency where a kernel has no spectrum, what is left is noise, and not the same at its conjugate.

    Arguments:
        W: Matrices (f, ..., o, i).

    >>> without_noise(torch.tensor([[[1.0]], [[1e-9]]])).flatten()
    tensor([1., 0.])
    """
    norms = torch.linalg.vector_norm(W.detach(), dim=-2, keepdim=True)
    least = 4 * W.shape[-2] * torch.finfo(W.dtype).eps * norms.amax(0, keepdim=True)
    return torch.where(norms > least, W, 0)


def row_norms(x: Tensor) -> Tensor:
    """Norm of each example of a batch (b, ...), at any scale.

    Arguments:
        x: Batch (b, ...).

    Returns:
        Shape (b,).

    >>> row_norms(torch.full((1, 4), 1e-30))
    tensor([2.0000e-30])
    """
    x = x.flatten(1)
    norms: Tensor = torch.linalg.vector_norm(x, dim=1)
    if not x.shape[1]:
        return norms
    largest, tiny = x.detach().abs().amax(1), torch.finfo(x.dtype).tiny
    scale = torch.where((largest > 0) & (largest < math.inf), largest, 1)
    scaled: Tensor = torch.linalg.vector_norm(x / scale[:, None], dim=1) * scale
    return torch.where((norms > tiny**0.25) & (norms < math.inf), norms, scaled)  # else squares may vanish, or overflow


def weight_norm(V: Tensor, g: Tensor) -> Tensor:
    """Return g V / |V| (Section 4.1), zero where V is zero; its gradient takes few passes over V.

    Arguments:
        V: Real tensor of any shape.
        g: Norm that the result has.

    >>> weight_norm(torch.tensor([3.0, 4.0]), torch.tensor(10.0))
    tensor([6., 8.])
    """

    def ordinary(V: Tensor, g: Tensor) -> Tensor:
        return V * weight_scale(V, g)

    def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
        return weight_norm_gradients(grad.clone(), *inputs)

    return with_gradient((V, g), ordinary, lambda V, g: (ordinary(V, g), ()), backward)


def weight_scale(V: Tensor, g: Tensor) -> Tensor:
    """Return g / |V|, the factor that gives V the norm g (Section 4.1); zero where V is zero."""
    return torch.div(g, positive_norm(V))


def positive_norm(V: Tensor) -> Tensor:
    """Return |V|, or a tiny number where V is zero."""
    norm: Tensor = torch.linalg.vector_norm(V)
    return norm.clamp_min(1e-12)


def weight_norm_gradients(grad: Tensor, V: Tensor, g: Tensor, norm: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of V and g from that of g V / |V|, which is overwritten; `norm` is |V|, if it is known."""
    norm = positive_norm(V) if norm is None else norm
    along = torch.dot(grad.reshape(-1), V.reshape(-1)) / norm
    return grad.mul_(g / norm).addcmul_(V, -along * g / norm**2), along


def gram(V: Tensor) -> Tensor:
    """Return V V^T of a real matrix (m, n); its gradient takes one product, not two.

    Arguments:
        V: Matrix (m, n).

    >>> gram(torch.ones(2, 3))
    tensor([[3., 3.],
            [3., 3.]])
    """

    def backward(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
        return (product(grad + grad.mT, inputs[0]),)

    return with_gradient((V,), lambda V: V @ V.mT, lambda V: (lower_gram(V), ()), backward)


def lower_gram(V: Tensor) -> Tensor:
    """V V* for V (..., m, n); of large matrices, blocks above the diagonal are not computed.

    Arguments:
        V: Matrices (..., m, n).

    >>> lower_gram(torch.ones(1, 2, 3))
    tensor([[[3., 3.],
             [3., 3.]]])
    """
    m = V.shape[-2]
    if m < 256 or not budget.has_cache(V.device):
        return product(V, V.mH)
    V = V.contiguous() if is_faster(V, V.mT) else V  # so that no part of it is copied again
    upper, lower = V[..., : m // 2, :], V[..., m // 2 :, :]
    below = product(lower, upper.mH)
    rows = (torch.cat((lower_gram(upper), below.mH), dim=-1), torch.cat((below, lower_gram(lower)), dim=-1))
    return torch.cat(rows, dim=-2)


@torch.no_grad()
def gram_factor(V: Tensor) -> Tensor | None:
    """Cholesky's factors L of V* V = L L* in the precision of `V`; None where they are not well-conditioned.

    The largest norm of all L, times the largest norm of their inverses, must be small: a V that is far smaller than the
    others is not well-conditioned, either.

    Arguments:
        V: Matrices (..., m, n) with m >= n.

    >>> gram_factor(torch.eye(3, 2)) is not None, gram_factor(torch.ones(3, 2)) is None
    (True, True)
    """
    L, failed = torch.linalg.cholesky_ex(lower_gram(V.mH))
    if failed.any():
        return None
    I = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)  # noqa: E741
    inverses = torch.linalg.solve_triangular(L, I.expand_as(L), upper=False)
    condition = _quick_bound(L).max() * _quick_bound(inverses).max()
    if condition > _MOST_CONDITION:
        condition = norm_bound(L, 1).max() * norm_bound(inverses, 1).max()
    return L if condition <= _MOST_CONDITION else None


def _quick_bound(W: Tensor) -> Tensor:
    """Upper bound of the spectral norm of `W` (..., m, n) by sums of rows and columns, without a product."""
    entries = W.abs()
    return (entries.sum(-1).amax(-1) * entries.sum(-2).amax(-1)).sqrt()
