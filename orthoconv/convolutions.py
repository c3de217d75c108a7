"""Convolution of images by one product at each frequency of a plane."""

__all__ = ["convolve", "convolve_by"]

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orthoconv.autograd import Tensors, with_gradient
from orthoconv.planes import Plane, chunks, is_plain

Multiply = Callable[[Tensor, Tensor], Tensor]


def convolve(p: Plane, x: Tensor, D: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolution of images (b, g i, h, w) by one matrix per frequency of the plane, D (f, g, o, i)."""
    return convolve_by(p, x, D, lambda S, D: S @ D.mT, D.shape[-2], bias)


def convolve_by(
    p: Plane, x: Tensor, operator: Tensor, multiply: Multiply, channels: int, bias: Tensor | None = None
) -> Tensor:
    """Convolution of images (b, g i, h, w) by a product at each frequency of the plane.

    Arguments:
        p: The plane.
        x: Images.
        operator: What the product takes, (f, g, ...).
        multiply: Function of coefficients (f g, b, i) and the operators of their frequencies, (f g, ...); returns
            coefficients (f g, b, channels).
        channels: Output channels of a group.
        bias: Numbers (g channels) to add, if any.
    """
    g, X, A = operator.shape[1], p.transform(x), operator.flatten(0, 1)
    if not is_plain(x) or not is_plain(A):
        return p.invert(_join(p, multiply(_take(p, X, g), A), bias, g))
    Y = p.empty(x, g * channels)
    each = 2 * x.element_size() * len(x) * (x.shape[1] + g * channels)
    for some in chunks(len(p), each, device=x.device):
        p.put(Y, some, g, multiply(p.take(X, some, g), A[some.start * g : some.stop * g]))
    if bias is not None:
        p.mean(Y).add_(bias * math.prod(p.size))
    return p.invert(Y)


def _take(p: Plane, X: Tensor, g: int) -> Tensor:
    """Coefficients of all frequencies, (f g, b, c). The gradient goes back by `join`, without arrays of zeros."""

    def take(X: Tensor) -> Tensor:
        return p.take(X, slice(None), g)

    def backward(grad: Tensor, *_: object) -> Tensors:
        return (p.join(grad, g),)

    return with_gradient((X,), take, lambda X: (take(X), ()), backward, keep_inputs=False)


def _join(p: Plane, Y: Tensor, bias: Tensor | None, g: int) -> Tensor:
    """Coefficients from those of all frequencies, (f g, b, c), with the bias added. The gradient comes by `take`."""
    pixels = math.prod(p.size)

    def ordinary(Y: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            Y = torch.cat((Y[:g] + bias.view(g, 1, -1) * pixels, Y[g:]))
        return p.join(Y, g)

    def forward(Y: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[()]]:
        X = p.join(Y, g)
        if bias is not None:
            p.mean(X).add_(bias * pixels)
        return X, ()

    def backward(grad: Tensor, needed: Sequence[bool], *_: object) -> Tensors:
        of_bias = pixels * p.mean(grad).real.sum(0) if needed[1] else None
        return p.take(grad, slice(None), g) if needed[0] else None, of_bias

    return with_gradient((Y, bias), ordinary, forward, backward, keep_inputs=False)
