"""Plain circular convolution, the unconstrained baseline."""

__all__ = ["CircularConv2d"]

from torch import Tensor, nn

from orthoconv.nn.arguments import Pair
from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.methods import register_method


class CircularConv2d(WeightConv2d):
    """Convolution with circular padding and the stride of the layers here; it guarantees nothing.

    Arguments are those of `WeightConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> CircularConv2d(3, 8, 4, stride=2)(torch.randn(1, 3, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return sources[0]


register_method("plain", conv=CircularConv2d, linear=nn.Linear)
