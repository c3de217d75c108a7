"""Layers divided by their Frobenius norm, the cheapest bound of a norm (Anil, Lucas and Grosse, 2019)."""

__all__ = ["FrobeniusConv2d", "FrobeniusLinear"]

import math
from typing import ClassVar

import torch
from torch import Tensor

from orthoconv.nn.arguments import Pair
from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method


class FrobeniusConv2d(WeightConv2d):
    r"""Convolution whose kernel is divided by a bound of its norm: never expansive, for any weight.

    .. math:: W / (\sqrt{k_h k_w} \, |W|_F)

    The norm of the convolution is at most the sum of the norms of its taps, whatever the size of the image. It is much
    smaller than that bound for more than one channel, so a deep network of such layers loses its signal. Each group is
    divided by its own bound. A weight of zero stays zero.

    Arguments are those of `BaseConv2d`, and

        identity: Whether the weight starts as the identity kernel; otherwise as that of nn.Conv2d.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> FrobeniusConv2d(3, 8, 3).singular_values((8, 8)).max().item() <= 1 + 1e-6
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        W = sources[0].unflatten(0, (self.groups, -1))  # (g, o, i, kh, kw)
        return (_normalized(W, (1, 2, 3, 4)) / math.sqrt(W.shape[-2] * W.shape[-1])).flatten(0, 1)


class FrobeniusLinear(BaseLinear):
    """Linear layer whose matrix is `weight` divided by its Frobenius norm: never expansive; zero stays zero.

    It is orthogonal for one output, as in the critics of Anil, Lucas and Grosse, Sorting out Lipschitz functions, 2019.
    For more of them its norm is below 1, for n equal singular values by the square root of n.

    Arguments are those of `BaseLinear`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> round(FrobeniusLinear(20, 1).lipschitz(), 5)
    1.0
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return _normalized(sources[0], (0, 1))


def _normalized(W: Tensor, axes: tuple[int, ...]) -> Tensor:
    """W divided by its norm over some axes; zero where W is."""
    largest = W.detach().abs().amax(axes, keepdim=True)
    V = W / largest.where(largest > 0, 1)  # the squares of small entries would be 0
    norm: Tensor = torch.linalg.vector_norm(V, dim=axes, keepdim=True)
    return V / norm.where(norm > 0, 1)


register_method("frobenius", linear=FrobeniusLinear)  # a network of such convolutions learns nothing
