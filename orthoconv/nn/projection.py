"""Kernels whose Cayley transform is near to a given convolution."""

__all__ = ["near_cayley"]

import torch
from torch import Tensor

from orthoconv import fourier
from orthoconv.linalg import cayley, cayley_preimage, pivot_signs, polar, without_noise
from orthoconv.nn.arguments import Pair

_DAMPED = ((0.02, 1.0), (0.3, 1.2), (0.3, 1.6), (0.3, 2.0))  # damping of the preimage, and its scale


def near_cayley(
    kernel: Tensor, dilation: Pair = (1, 1), groups: int = 1, signs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Kernel W and signs s of the inputs, with cayley(W) s near the orthogonal convolution nearest to `kernel`.

    That convolution is the polar factor Q at each frequency. W is the kernel with the same taps that is nearest to
    preimages of Q s on a small image. For one tap it is exact. Otherwise Q has more taps than W; and large preimages,
    of eigenvalues of Q s near -1, are damped where that brings cayley(W) nearer to Q s.

    Arguments:
        kernel: Of shape (o, i / groups, kh, kw).
        signs: Signs (i,) if they are given; by default they are chosen.

    >>> Q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
    >>> W, signs = near_cayley(Q[..., None, None])
    >>> torch.dist(cayley(W[..., 0, 0]) * signs, Q).item() < 1e-10
    True
    """
    K, taps = kernel.detach().double(), (kernel.shape[2], kernel.shape[3])
    rows, columns = (1 if t == 1 else 2 * d * (t - 1) + 2 for t, d in zip(taps, dilation, strict=True))
    size = rows, columns

    def spectrum(W: Tensor) -> Tensor:  # (g, f, o, i)
        return fourier.spectrum(W, size, dilation=dilation, groups=groups)

    exact = signs is None and taps == (1, 1)  # the signs that are chosen make sure that there is a preimage
    Q = polar(without_noise(spectrum(K).transpose(0, 1))).transpose(0, 1)
    if signs is None:
        mean = fourier.nearest_kernel(Q, size, (1, 1))[..., 0, 0]  # over all frequencies
        signs = torch.cat([pivot_signs(M) for M in mean.chunk(groups)])
    target = Q * signs.to(K).view(groups, 1, 1, -1)

    def distance(W: Tensor) -> float:
        return torch.dist(cayley(spectrum(W)), target).item()

    candidates = [
        scale * fourier.nearest_kernel(cayley_preimage(target, damping), size, taps, dilation=dilation)
        for damping, scale in (((0.0, 1.0),) if exact else _DAMPED)
    ]
    W = min(candidates, key=distance)
    return W.to(kernel.dtype), signs.to(kernel.dtype)
