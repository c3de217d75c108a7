"""Gram matrices of kernels and of spectra: what bounds the norm of a convolution from above."""

__all__ = ["gram_kernel", "norm_bounds"]

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.linalg import gram, lower_gram


def gram_kernel(W: Tensor) -> Tensor:
    """Kernel (i, i, 2 kh - 1, 2 kw - 1) of W* W: the correlation of W (o, i, kh, kw) with itself.

    >>> gram_kernel(torch.ones(1, 1, 1, 3))
    tensor([[[[1., 2., 3., 2., 1.]]]])
    """
    kernels, (kh, kw) = W.transpose(0, 1), W.shape[2:]
    if kh == kw == 1:
        return gram(kernels[:, :, 0, 0])[:, :, None, None]
    return F.conv2d(kernels, kernels, padding=(kh - 1, kw - 1)).transpose(0, 1)


def norm_bounds(D: Tensor, squarings: int) -> Tensor:
    r"""Upper bound (g) of the norm of each convolution whose spectrum is D (g, f, m, n), differentiable in D.

    .. math:: \max_f \, (\mathrm{tr}\, G_f^{q+1})^{1/(2q+2)}, \qquad G_f = D_f D_f^*, \qquad q = 2^{\text{squarings}}

    It is too large by the factor min(m, n)^(1/(2q+2)) at the most. This is the Gram iteration of Delattre et al.,
    Efficient Bound of Lipschitz Constant for Convolutional Layers by Gram Iteration, ICML 2023, at each frequency.
    On a CPU, the frequency with the largest bound after one squaring is finished first, and those that cannot have a
    larger one are left out as soon as that is known. The power q + 1 in place of 2q makes the gradient a multiple of
    G^q D, at one frequency: it needs no further power.

    >>> norm_bounds(torch.diag(torch.tensor([3.0, 1.0]))[None, None], 6)
    tensor([3.0000])
    """
    return with_gradient(
        (D,), partial(_every_frequency, squarings=squarings), partial(_screened, squarings=squarings), _gradient
    )


def _every_frequency(D: Tensor, squarings: int) -> Tensor:
    """`norm_bounds` for torch to differentiate."""
    G, first = _gram(D)
    P, bound = G, first
    for k in range(squarings):
        P, bound = _squared(P, bound, k)
    return _last(G, first, P, bound, squarings)[1].amax(1) * _rounding(D)


def _screened(D: Tensor, squarings: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`norm_bounds`; with it the frequency (g) of the largest bound, and the matrix Q (g, m, m) of the gradient."""
    looks = budget.has_cache(D.device)  # an accelerator would wait
    own, frequencies = torch.arange(len(D), device=D.device), torch.arange(D.shape[1], device=D.device)
    G, first = _gram(D)
    P, bound, least = G, first, first.amax(1, keepdim=True) / min(D.shape[-2:]) ** 0.25  # some norm is as large as that
    for k in range(squarings):
        if looks and k == 1:
            least = _of_the_largest(G, first, P, bound, squarings)
        keep = (1.001 * bound >= least).any(0)  # a bound only falls from here on
        if looks and not bool(keep.all()):
            frequencies, G, first, P, bound = frequencies[keep], *(t[:, keep] for t in (G, first, P, bound))
        P, bound = _squared(P, bound, k)
    product, bound = _last(G, first, P, bound, squarings)
    best = bound.argmax(1)
    product, value = product[own, best], bound[own, best] * _rounding(D)
    Q = P[own, best] * (value / product.where(product > 0, math.inf))[:, None, None]
    return value, (frequencies[best], Q)


def _of_the_largest(G: Tensor, first: Tensor, P: Tensor, bound: Tensor, squarings: int) -> Tensor:
    """The last bound (g, 1) of the frequency that has the largest bound after one squaring."""
    own, best = torch.arange(len(G), device=G.device)[:, None], bound.argmax(1, keepdim=True)
    G, first, P, bound = (t[own, best] for t in (G, first, P, bound))
    for k in range(1, squarings):
        P, bound = _squared(P, bound, k)
    return _last(G, first, P, bound, squarings)[1]


def _gradient(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> Tensors:
    """Gradient of b = (tr G^(q+1))^(1/(2q+2)), which is Q D with Q = b G^q / tr G^(q+1), at one frequency."""
    (D,), (frequency, Q) = inputs, kept
    own = torch.arange(len(D), device=D.device)
    X = (grad[:, None, None] * Q) @ _wide(D[own, frequency])
    X = X if D.shape[-2] <= D.shape[-1] else X.mH
    if D.shape[1] == 1:
        return (X[:, None],)
    result = torch.zeros_like(D)
    result[own, frequency] = X
    return (result,)


def _gram(D: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrices on the shorter side, normalised, and the first bounds (g, f)."""
    D = _wide(D)
    G = lower_gram(D)
    norm = _norm(G)
    return _divided(G, norm), norm**0.5


def _squared(P: Tensor, bound: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Squares of Hermitian matrices, normalised, and the bounds (g, f) that they give, the last after k squarings."""
    P = lower_gram(P)
    norm = _norm(P)
    return _divided(P, norm), bound * norm ** (0.5 ** (k + 2))


def _last(G: Tensor, first: Tensor, P: Tensor, bound: Tensor, squarings: int) -> tuple[Tensor, Tensor]:
    """<D D*, P> and (tr G^(q+1))^(1/(2q+2)) = (|G| |G^q| <G / |G|, P>)^(1/(2q+2)), each (g, f).

    G and its power P are given normalised, their norms by the bounds |G|^(1/2) and |G^q|^(1/2q).
    """
    q, product = 2**squarings, (G.conj() * P).real.sum((-2, -1)).clamp_min(torch.finfo(G.dtype).tiny)
    return first**2 * product, first ** (1 / (q + 1)) * bound ** (q / (q + 1)) * product ** (1 / (2 * q + 2))


def _divided(G: Tensor, norm: Tensor) -> Tensor:
    """Matrices (g, f, m, m) over their norms; torch takes twice as long to divide complex numbers by real ones."""
    factor = norm.reciprocal()[..., None, None]
    return torch.view_as_complex(torch.view_as_real(G) * factor[..., None]) if G.is_complex() else G * factor


def _norm(G: Tensor) -> Tensor:
    entries = (torch.view_as_real(G) if G.is_complex() else G).flatten(2)  # torch is slow with norms of complex numbers
    norms: Tensor = torch.linalg.vector_norm(entries, dim=-1)
    return norms.clamp_min(torch.finfo(G.dtype).tiny)


def _wide(D: Tensor) -> Tensor:
    return D if D.shape[-2] <= D.shape[-1] else D.mH


def _rounding(D: Tensor) -> float:
    """Factor that rounds a bound up."""
    return 1 + 4 * math.sqrt(sum(D.shape[-2:])) * torch.finfo(D.dtype).eps
