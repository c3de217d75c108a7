"""The rest of a Cayley convolution with few inputs, in space: [y; -V * (x + y)] from y = (R - I) x.

Only n of the n + r outputs pass through the Fourier plane; V is an ordinary kernel. The code convolves x + y with
[I; -V], and subtracts x from the first outputs: no further pass over the images is needed.
"""

__all__ = ["can_lift", "lift"]

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.autograd import Tensors, with_gradient
from orthoconv.fourier import padding
from orthoconv.nn.arguments import Pair
from orthoconv.nn.kernel import wrap
from orthoconv.planes import chunks


def can_lift(k: Pair, dilation: Pair, size: Pair) -> bool:
    """Whether a kernel has a tap at the pixel itself, and reads no pixel of the image twice."""
    before, after = padding(k, dilation)
    axes = zip(before, after, dilation, size, strict=True)
    return all(b % d == 0 and b + a < n for b, a, d, n in axes)


def lift(y: Tensor, x: Tensor, V: Tensor, bias: Tensor | None, dilation: Pair = (1, 1)) -> Tensor:
    """[y; -V * (x + y)] plus the bias, for y and x (b, n, h, w) and a kernel V (r, n, kh, kw) that `can_lift`.

    >>> y, x, V = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(6, 3, 3, 3)
    >>> lift(y, x, V, None).shape
    torch.Size([2, 9, 5, 4])
    """
    n, k = V.shape[1], (V.shape[2], V.shape[3])
    before, _ = padding(k, dilation)
    eye = V.new_zeros(n, n, *k)
    eye[range(n), range(n), before[0] // dilation[0], before[1] // dilation[1]] = 1
    K = torch.cat((eye, -V))
    return with_gradient(
        (y, x, K, bias), partial(_ordinary, dilation), partial(_lift, dilation), partial(_back, dilation)
    )


def _ordinary(dilation: Pair, y: Tensor, x: Tensor, K: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve x + y with K (o, n, kh, kw), and subtract x from the first n outputs."""
    n, z = K.shape[1], wrap(x + y, *padding(K.shape[2:], dilation))
    out = F.conv2d(z, K, bias, dilation=dilation)
    return torch.cat((out[:, :n] - x, out[:, n:]), dim=1)


def _lift(dilation: Pair, y: Tensor, x: Tensor, K: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    z = wrap(x + y, *padding(K.shape[2:], dilation))
    out = F.conv2d(z, K, bias, dilation=dilation)
    out[:, : K.shape[1]].sub_(x)
    return out, (z,)


def _back(
    dilation: Pair, grad: Tensor, needed: Sequence[bool], inputs: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> Tensors:
    (y, _, K, _), (z,) = inputs, kept
    n, k = K.shape[1], (K.shape[2], K.shape[3])
    _, gK, gbias = torch.ops.aten.convolution_backward(
        grad, z, K, [len(K)], [1, 1], [0, 0], dilation, False, [0, 0], 1, [False, needed[2], needed[3]]
    )
    gz, matrix = torch.empty_like(y), K.permute(2, 3, 1, 0).flatten(0, 2)  # (kh kw n, o)
    for some in chunks(len(y), 2 * matrix.shape[0] * y[0, 0].numel() * y.element_size(), device=y.device):
        G = grad[some].flatten(2)
        P = torch.bmm(matrix.expand(len(G), -1, -1), G)  # faster than torch's, for few channels
        gz[some] = _gather(P.unflatten(2, y.shape[2:]), n, k, dilation)
    return gz, gz - grad[:, :n] if needed[1] else None, gK, gbias


def _gather(P: Tensor, n: int, k: Pair, dilation: Pair) -> Tensor:
    """The adjoint of taking patches: (b, kh kw n, h, w) to (b, n, h, w)."""
    h, w = P.shape[2:]
    (top, left), (bottom, right) = padding(k, dilation)
    z = P.new_zeros(len(P), n, top + h + bottom, left + w + right)
    taps = P.unflatten(1, (*k, n))
    for p, q in product(range(k[0]), range(k[1])):
        at, to = p * dilation[0], q * dilation[1]
        z[:, :, at : at + h, to : to + w].add_(taps[:, p, q])
    z[:, :, h : h + top].add_(z[:, :, :top])
    z[:, :, top : top + bottom].add_(z[:, :, top + h :])
    z[..., w : w + left].add_(z[..., :left])
    z[..., left : left + right].add_(z[..., left + w :])
    return z[:, :, top : top + h, left : left + w]
