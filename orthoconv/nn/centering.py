"""Layers that move the origin: a bias for each pixel, and means that are subtracted."""

__all__ = ["BatchCentering", "LayerCentering", "PixelBias"]

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import check_floating, flag, number, pair, positive_int
from orthoconv.nn.layer import Guarantee, Layer


class PixelBias(Layer):
    """Add a learned number to each entry of an image; at first 0.

    It tells circular convolutions where a pixel is, and leaves distances as they are.

    Arguments:
        channels: Number of channels.
        size: Height and width of the image, an int or a pair.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, c, h, w), to the same.

    >>> PixelBias(3, 4)(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(
        self,
        channels: int,
        size: int | Sequence[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_floating("PixelBias", dtype)
        shape = positive_int("channels", channels), *pair("size", size)
        self.bias = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1:] != self.bias.shape:
            raise ValueError(f"PixelBias takes images (b, *{tuple(self.bias.shape)}), got shape {tuple(x.shape)}")
        return x + self.bias

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 1.0

    def extra_repr(self) -> str:
        return f"{self.bias.shape[0]}, {tuple(self.bias.shape[1:])}"


class BatchCentering(Layer):
    """Subtract the mean of each channel over the batch and the pixels: batch normalisation without the division.

    In eval mode it subtracts the running mean of the training batches, which leaves distances as they are. In training
    an output depends on the whole batch; so there is a Lipschitz bound in eval mode only.

    Arguments:
        channels: Number of channels.
        momentum: Weight of the newest batch in the running mean, in [0, 1].
        bias: Whether a learned number is added to each channel.
        device: Device of the running mean and of the parameters.
        dtype: Precision of the running mean and of the parameters.

    Shape:
        (b, c, ...), to the same.

    >>> BatchCentering(1, bias=False)(torch.tensor([[1.0], [3.0]]))
    tensor([[-1.],
            [ 1.]])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"
    running_mean: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        channels: int,
        momentum: float = 0.1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_floating("BatchCentering", dtype)
        self.momentum = number("momentum", momentum, "in [0, 1]", lambda v: 0 <= v <= 1)
        zeros = torch.zeros(positive_int("channels", channels), device=device, dtype=dtype)
        self.register_buffer("running_mean", zeros)
        self.register_parameter("bias", nn.Parameter(zeros.clone()) if flag("bias", bias) else None)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != len(self.running_mean):
            channels = len(self.running_mean)
            raise ValueError(f"BatchCentering takes (b, c, ...) with {channels} channels, got shape {tuple(x.shape)}")
        mean = self.running_mean
        if self.training and x.numel():
            mean = x.mean([axis for axis in range(x.ndim) if axis != 1])
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        shift = mean if self.bias is None else mean - self.bias  # first, so that large means and biases cancel
        return x - shift.view(-1, *[1] * (x.ndim - 2))

    def lipschitz(self, shape: Sequence[int]) -> float:
        if self.training:
            raise TypeError("BatchCentering is bounded in eval mode only; call model.eval()")
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 1.0

    def extra_repr(self) -> str:
        return f"{len(self.running_mean)}, momentum={self.momentum}, bias={self.bias is not None}"


class LayerCentering(Layer):
    """Subtract from each example its own mean, channel by channel: an orthogonal projection.

    Arguments:
        dim: Axes of the mean, counted from the last, so that the batch is not among them; by default those of the
            pixels. (-3, -2, -1) is the whole image, and (-1,) a vector.

    Shape:
        (b, ...), to the same.

    >>> LayerCentering()(torch.tensor([[[[1.0, 3.0]]]]))
    tensor([[[[-1.,  1.]]]])
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def __init__(self, dim: Sequence[int] = (-2, -1)) -> None:
        super().__init__()
        self.dim = tuple(dim) if isinstance(dim, Sequence) else ()
        if (
            not self.dim
            or len(set(self.dim)) < len(self.dim)
            or not all(isinstance(d, int) and d < 0 for d in self.dim)
        ):
            raise ValueError(f"dim must be different negative ints, such as (-2, -1), got {dim!r}")

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim <= -min(self.dim):
            raise ValueError(f"LayerCentering takes a batch with the axes {self.dim}, got shape {tuple(x.shape)}")
        return x - x.mean(self.dim, keepdim=True)

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return math.prod(shape[d] for d in self.dim) + 4.0

    def extra_repr(self) -> str:
        return f"{self.dim}"
