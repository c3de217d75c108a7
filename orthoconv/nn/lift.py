"""The rest of a Cayley convolution with few inputs, in space: [y; -V * (x + y)] from y = (R - I) x.

Of the n + r outputs only n pass through the Fourier plane. V is an ordinary kernel with few inputs, so its convolution
is one product of a small matrix with patches of x + y; y and a one among them bring in the first outputs and the bias,
with no further pass over the images.
"""

__all__ = ["lift"]

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from orthoconv.nn.kernel import padding, wrap
from orthoconv.nn.memory import Pair

_CHUNK = 2**22  # bytes of the patches that are taken at once


def lift(y: Tensor, x: Tensor, V: Tensor, bias: Tensor | None, dilation: Pair = (1, 1)) -> Tensor:
    """[y; -V * (x + y)] plus the bias, for y and x (b, n, h, w) and a kernel V (r, n, kh, kw) no larger than they are.

    >>> y, x, V = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), torch.randn(6, 3, 3, 3)
    >>> lift(y, x, V, None).shape
    torch.Size([2, 9, 5, 4])
    """
    r, n = V.shape[:2]
    constant = V.new_zeros(n + r) if bias is None else bias
    eye = torch.eye(n, dtype=V.dtype, device=V.device)
    taps = V.permute(0, 2, 3, 1).flatten(1)
    first = torch.cat((eye.new_zeros(n, taps.shape[1]), eye, constant[:n, None]), dim=1)
    second = torch.cat((-taps, eye.new_zeros(r, n), constant[n:, None]), dim=1)
    images: Tensor = _Lift.apply(y, x, torch.cat((first, second)), (V.shape[2], V.shape[3]), dilation)
    return images


class _Lift(torch.autograd.Function):
    """Product of the matrix K (o, t n + n + 1) with the t patches of x + y, y, and 1 at each pixel.

    Images are taken a few at a time, and their patches computed again for the gradient: they stay in the cache.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, K: Tensor, k: Pair, dilation: Pair) -> Tensor:
        out = y.new_empty(len(y), len(K), *y.shape[2:])
        for some in _chunks(y, K):
            torch.bmm(_each(K, y[some]), _patches(y[some], x[some], k, dilation), out=out[some].flatten(2))
        ctx.save_for_backward(y, x, K)
        ctx.k, ctx.dilation = k, dilation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, x, K = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the ordinary way
            out = torch.bmm(_each(K, y), _patches(y, x, ctx.k, ctx.dilation)).unflatten(2, y.shape[2:])
            needed = [t for t, wanted in zip((y, x, K), ctx.needs_input_grad, strict=False) if wanted]
            found = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
            return *(next(found) if wanted else None for wanted in ctx.needs_input_grad[:3]), None, None
        n, t = y.shape[1], ctx.k[0] * ctx.k[1]
        gz, gK = torch.empty_like(y), torch.zeros_like(K)
        for some in _chunks(y, K):
            G = grad[some].flatten(2)
            gK += (G @ _patches(y[some], x[some], ctx.k, ctx.dilation).mT).sum(0)
            gP = torch.bmm(_each(K[:, : t * n].mT, G), G).unflatten(2, y.shape[2:])
            gz[some] = _gather(gP, n, ctx.k, ctx.dilation)
        return gz + grad[:, :n], gz, gK, None, None


def _chunks(y: Tensor, K: Tensor) -> Iterator[slice]:
    """Images whose patches fit into the cache together."""
    step = max(1, _CHUNK // (y[0, 0].numel() * K.shape[1] * y.element_size()))
    return (slice(k, k + step) for k in range(0, len(y), step))


def _each(K: Tensor, images: Tensor) -> Tensor:
    """K for each image; a product of `K` with all of them would transpose them first."""
    return K.expand(len(images), -1, -1)


def _patches(y: Tensor, x: Tensor, k: Pair, dilation: Pair) -> Tensor:
    """(b, t n + n + 1, h w)."""
    b, n, h, w = x.shape
    z = wrap(x + y, *padding(k, dilation)).unfold(2, h, dilation[0]).unfold(3, w, dilation[1])  # (b, n, kh, kw, h, w)
    P = x.new_empty(b, (k[0] * k[1] + 1) * n + 1, h, w)
    P[:, : -n - 1].unflatten(1, (*k, n)).copy_(z.permute(0, 2, 3, 1, 4, 5))
    P[:, -n - 1 : -1].copy_(y)
    P[:, -1].fill_(1)
    return P.flatten(2)


def _gather(P: Tensor, n: int, k: Pair, dilation: Pair) -> Tensor:
    """The adjoint of taking patches: (b, t n, h, w) to (b, n, h, w)."""
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
