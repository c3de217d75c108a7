"""Plain circular convolution, the unconstrained baseline."""

__all__ = ["CircularConv2d"]

from torch import Tensor

from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.memory import Pair


class CircularConv2d(WeightConv2d):
    """Convolution with circular padding and the stride of the layers here; it guarantees nothing.

    Arguments and shapes are those of `CayleyConv2d`, without `signs`.

    >>> import torch
    >>> CircularConv2d(3, 8, 4, stride=2)(torch.randn(1, 3, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return sources[0]
