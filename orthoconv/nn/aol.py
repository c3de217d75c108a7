"""Almost-orthogonal layers (AOL).

Prach and Lampert, Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks, ECCV 2022. The form with
several steps is that of orthogonium (Boissin et al., An Adaptive Orthogonal Convolution Scheme, 2025).
"""

__all__ = ["AOLConv2d", "AOLConvTranspose2d", "AOLLinear"]

from typing import ClassVar

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.gram import gram_kernel
from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method


class AOLConv2d(WeightConv2d):
    r"""Convolution whose channels are scaled so that its norm is at most 1, for any weight.

    .. math:: W D, \qquad D_i = \Big(\sum_j |(W^* W)^q|_{ij}\Big)^{-1 / 2q}, \qquad q = 2^{\text{steps}}

    The matrix D^(-2q) - (W* W)^q is diagonally dominant, so it has no negative eigenvalue; neither has D^-2 - W* W
    (Loewner and Heinz). W* W is the correlation of the kernel with itself. The sums run over all its offsets, so that
    the bound holds for every image size, dilation and padding. More steps bring the norm nearer to 1. Each step doubles
    the length of the correlation on both axes, and costs about 16 times as much as the one before.

    With fewer output channels than input channels, the outputs are scaled instead: D W, with W W* in place of W* W.
    That matrix is smaller, and its bound is nearer to the norm. Channels whose weights are all zero are ignored, and
    receive no gradient.

    Arguments are those of `BaseConv2d`, and

        steps: How often W* W is squared; 0 is the method of the paper.
        identity: Whether the weight starts as the identity kernel, as in the paper; otherwise as that of nn.Conv2d,
            which AOL makes so small that a network of several layers hardly learns.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> AOLConv2d(3, 8, 3).singular_values((8, 8)).max().item() <= 1 + 1e-6
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def set_up(self, *, steps: int = 0, identity: bool = True) -> None:
        self.steps = _check_steps(steps)
        super().set_up(identity=identity)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return torch.cat([_rescaled(part, self.steps) for part in sources[0].chunk(self.groups)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, steps={self.steps}"


class AOLConvTranspose2d(TransposedConv2d, AOLConv2d):
    """Adjoint of the `AOLConv2d` of the same weight from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `steps` and `identity` as in `AOLConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> AOLConvTranspose2d(8, 2, 4, stride=2).singular_values((4, 4)).max().item() <= 1 + 1e-6
    True
    """


class AOLLinear(BaseLinear):
    """Linear layer whose inputs or outputs are scaled so that its norm is at most 1, for any weight: see `AOLConv2d`.

    Arguments are those of `BaseLinear`, and

        steps: How often W* W is squared; 0 is the method of the paper.

    Shape:
        (..., in_features), to (..., out_features).

    >>> AOLLinear(512, 10).lipschitz() <= 1 + 1e-6
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def set_up(self, *, steps: int = 0) -> None:
        self.steps = _check_steps(steps)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return _rescaled(sources[0][..., None, None], self.steps)[..., 0, 0]


def _rescaled(weight: Tensor, steps: int) -> Tensor:
    """W D for a kernel W (o, i, kh, kw), or D W if it has fewer outputs."""
    if weight.shape[0] < weight.shape[1]:
        return _rescaled(weight.transpose(0, 1), steps).transpose(0, 1)
    largest = weight.detach().abs().amax()
    W = weight / largest.where(largest > 0, 1)  # W D is the same for any multiple of W
    V = W if steps == 0 or not budget.has_double(W.device) else W.double()  # powers lose digits
    G = gram_kernel(V)
    for _ in range(steps):
        G = gram_kernel(G)  # of a self-adjoint G, its square
    sums = G.abs().sum((1, 2, 3))  # (i)
    used = sums > torch.finfo(sums.dtype).tiny
    D = torch.where(used, sums.where(used, 1) ** (-0.5 / 2**steps), 0)
    return W * D.to(W.dtype)[:, None, None]


def _check_steps(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 4:
        raise ValueError(f"steps must be an int from 0 to 4, got {value!r}")
    return value


register_method("aol", conv=AOLConv2d, linear=AOLLinear, transposed=AOLConvTranspose2d)
