"""Pooling that uses all the norm it is allowed (Section 5.1)."""

__all__ = ["L2Pool2d", "ScaledAdaptiveAvgPool2d", "ScaledAvgPool2d", "ScaledMean"]

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.nn.arguments import Pair, axis, check_image, flag, pair
from orthoconv.nn.layer import Guarantee, Layer


class _Pool2d(Layer):
    """Pooling over windows that cover the image once; abstract."""

    @abstractmethod
    def window(self, size: Sequence[int]) -> Pair:
        """Return the sides of a window for images of that size, or raise an error that names it."""

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return math.prod(self.window(shape[-2:])) + 4.0  # a sum of k terms, and what is done to it


class ScaledAvgPool2d(_Pool2d):
    """Average over blocks of k x k pixels, times k: its norm is exactly 1.

    Arguments:
        kernel_size: Side k of a block, an int or a pair; it divides the image.

    Shape:
        (..., h, w), to (..., h / k, w / k).

    >>> ScaledAvgPool2d(2)(torch.ones(1, 1, 4, 4)).flatten()
    tensor([2., 2., 2., 2.])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(self, kernel_size: int | Sequence[int]) -> None:
        super().__init__()
        self.kernel_size = pair("kernel_size", kernel_size)

    def window(self, size: Sequence[int]) -> Pair:
        return _dividing("ScaledAvgPool2d", self.kernel_size, size)

    def forward(self, x: Tensor) -> Tensor:
        return _scaled_average(x, self.window(x.shape[-2:]))

    def extra_repr(self) -> str:
        return f"{self.kernel_size}"


class ScaledAdaptiveAvgPool2d(_Pool2d):
    """`ScaledAvgPool2d` over as many windows as are asked for: its norm is exactly 1.

    Arguments:
        output_size: Number of windows along each side, an int or a pair; it divides the image.

    Shape:
        (..., h, w), to (..., *output_size).

    >>> ScaledAdaptiveAvgPool2d(1)(torch.ones(1, 1, 4, 4)).flatten()
    tensor([4.])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(self, output_size: int | Sequence[int]) -> None:
        super().__init__()
        self.output_size = pair("output_size", output_size)

    def window(self, size: Sequence[int]) -> Pair:
        oh, ow = _dividing("ScaledAdaptiveAvgPool2d", self.output_size, size)
        return size[0] // oh, size[1] // ow

    def forward(self, x: Tensor) -> Tensor:
        return _scaled_average(x, self.window(x.shape[-2:]))

    def extra_repr(self) -> str:
        return f"{self.output_size}"


class ScaledMean(Layer):
    """Mean over some axes, times the root of the number of entries: its norm is exactly 1.

    Arguments:
        dim: Axes, an int or a sequence; not that of the batch, and counted from the first, or from the last if < 0.
        keepdim: Whether the axes stay, with length 1.

    Shape:
        (b, ...), to the same without these axes.

    >>> ScaledMean((2, 3))(torch.ones(1, 2, 3, 3))
    tensor([[3., 3.]])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def __init__(self, dim: int | Sequence[int], keepdim: bool = False) -> None:
        super().__init__()
        several = isinstance(dim, Sequence) and not isinstance(dim, str)
        self.dim = tuple(axis("each dim", d) for d in dim) if several else (axis("dim", dim),)  # type: ignore[union-attr]
        self.keepdim = flag("keepdim", keepdim)
        if not self.dim or 0 in self.dim or len(set(self.dim)) < len(self.dim):
            raise ValueError(f"dim must be different axes, none of them that of the batch, got {dim!r}")

    def forward(self, x: Tensor) -> Tensor:
        entries = self._entries(x.shape[1:])
        return x.mean(self.dim, self.keepdim) * math.sqrt(entries)

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0 + 2 * torch.finfo(torch.float64).eps

    def rounding_units(self, shape: Sequence[int]) -> float:
        return self._entries(shape) + 4.0

    def _entries(self, shape: Sequence[int]) -> int:
        """Entries of one mean, for inputs of that shape."""
        if any(not -len(shape) <= d <= len(shape) for d in self.dim):
            raise ValueError(f"ScaledMean takes a batch with the axes {self.dim}, got the shape {tuple(shape)} of one")
        places = [d - 1 if d > 0 else len(shape) + d for d in self.dim]
        if len(set(places)) < len(places):
            raise ValueError(f"two of the axes {self.dim} of ScaledMean are one, for examples of shape {tuple(shape)}")
        return math.prod(shape[place] for place in places)

    def extra_repr(self) -> str:
        return f"{self.dim}, keepdim={self.keepdim}"


class L2Pool2d(_Pool2d):
    """Norm of each block of k x k pixels, channel by channel: the norm of the image stays as it is.

    The gradient of a block of zeros is 0 (LipNeXt, 2026, for the whole image).

    Arguments:
        kernel_size: Side k of a block, an int or a pair, which divides the image; by default the whole image.

    Shape:
        (..., h, w), to (..., h / k, w / k), or (..., 1, 1).

    >>> L2Pool2d()(torch.tensor([[[[3.0, 0.0], [0.0, 4.0]]]]))
    tensor([[[[5.]]]])
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def __init__(self, kernel_size: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.kernel_size = None if kernel_size is None else pair("kernel_size", kernel_size)

    def window(self, size: Sequence[int]) -> Pair:
        return _dividing("L2Pool2d", self.kernel_size, size)

    def forward(self, x: Tensor) -> Tensor:
        kh, kw = self.window(x.shape[-2:])
        blocks = x.unflatten(-1, (-1, kw)).unflatten(-3, (-1, kh))  # (..., H, kh, W, kw)
        largest = blocks.detach().abs().amax((-3, -1), keepdim=True)
        scale = torch.where(largest > 0, largest, 1)  # squares of small entries vanish, those of large ones overflow
        norms: Tensor = torch.linalg.vector_norm(blocks / scale, dim=(-3, -1))
        return norms * scale.squeeze(-1).squeeze(-2)

    def extra_repr(self) -> str:
        return "" if self.kernel_size is None else f"{self.kernel_size}"


def _dividing(name: str, sides: Pair | None, size: Sequence[int]) -> Pair:
    """Return `sides`, or those of the whole image, if they divide an image of that size."""
    check_image(name, size)
    sides = sides or (size[0], size[1])
    if not size[0] or not size[1] or size[0] % sides[0] or size[1] % sides[1]:
        raise ValueError(f"{name} takes images whose sides {sides} divide, got {tuple(size)}")
    return sides


def _scaled_average(x: Tensor, window: Pair) -> Tensor:
    images = x[None] if x.ndim == 2 else x.flatten(0, -4) if x.ndim > 4 else x  # as F.avg_pool2d takes them
    pooled = F.avg_pool2d(images, window)
    pooled = pooled if images is x else pooled.reshape(*x.shape[:-2], *pooled.shape[-2:])
    return math.sqrt(math.prod(window)) * pooled
