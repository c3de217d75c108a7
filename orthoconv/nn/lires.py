"""Linear residual convolutions (LiRes).

Hu, Zou, Wang, Leino and Fredrikson, Unlocking Deterministic Robustness Certification on ImageNet, NeurIPS 2023.
"""

__all__ = ["LiResConv2d", "LiResConvTranspose2d"]

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.nn.arguments import Pair, number, positive_int
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.kernel import KernelConv2d
from orthoconv.nn.methods import register_method


class LiResConv2d(KernelConv2d):
    r"""Convolution by the identity and a free kernel; it guarantees nothing.

    .. math:: I + \frac{g}{\sqrt{\text{depth}}} K

    Its norm is what `lipschitz` finds from all its frequencies; a loss may hold it down. With i inputs, those of a
    whole block of pixels if there is a stride, and o outputs, I keeps the first min(i, o) channels of each group. It is
    at the tap nearest to the centre: with an even number of dilated taps that is a shift.

    Arguments are those of `BaseConv2d`, and

        depth: Number of such layers in the network.
        gain: Initial value of the learned factor g.
        identity: Whether g starts as 0 instead, so that the layer starts as I.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> layer, x = LiResConv2d(4, 4, 3, bias=False, identity=True), torch.rand(1, 4, 8, 8)
    >>> torch.equal(layer(x), x)
    True
    """

    def set_up(self, *, depth: int = 1, gain: float = 1.0, identity: bool = False) -> None:
        self.depth, self.identity = positive_int("depth", depth), bool(identity)
        self.initial_gain = number("gain", gain, "a finite number", math.isfinite)
        super().set_up()
        self.gain = self.new_parameter()

    def reset_parameters(self) -> None:
        """Initialise K by a normal distribution with deviation 1 / (i kh kw), and g by `gain`, or by 0."""
        nn.init.normal_(self.weight, std=1 / math.prod(self.kernel_shape[1:]))
        nn.init.constant_(self.gain, 0.0 if self.identity else self.initial_gain)
        self.reset_bias()

    def sources(self) -> tuple[Tensor, ...]:
        return self.weight, self.gain

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        K, gain = sources
        o, (i, kh, kw) = len(K) // self.groups, K.shape[1:]
        identity = torch.eye(o, i, dtype=K.dtype, device=K.device).repeat(self.groups, 1)[:, :, None, None]
        top, left = (kh - 1) // 2, (kw - 1) // 2
        return F.pad(identity, (left, kw - 1 - left, top, kh - 1 - top)) + gain / math.sqrt(self.depth) * K

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, depth={self.depth}"


class LiResConvTranspose2d(TransposedConv2d, LiResConv2d):
    """Adjoint of the `LiResConv2d` of the same kernel from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `depth`, `gain` and `identity` as in `LiResConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> LiResConvTranspose2d(12, 3, 3, stride=2)(torch.randn(1, 12, 4, 4)).shape
    torch.Size([1, 3, 8, 8])
    """


register_method("lires", conv=LiResConv2d, linear="cholesky", transposed=LiResConvTranspose2d)
