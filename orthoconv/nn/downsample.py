"""Blocks of pixels become channels, and back, without loss (Section 5.1; Jacobsen et al., i-RevNet, 2018)."""

__all__ = ["InvertibleDownsample", "InvertibleUpsample", "depth_to_space", "space_to_depth"]

from torch import Tensor

from orthoconv.nn.arguments import positive_int
from orthoconv.nn.layer import Permutation


class InvertibleDownsample(Permutation):
    """Move blocks of s x s pixels into the channels: a permutation, so nothing is lost.

    Arguments:
        block: Side s of a block.

    Shape:
        (b, c, h, w), to (b, c s s, h / s, w / s).

    >>> import torch
    >>> InvertibleDownsample(2)(torch.zeros(1, 3, 4, 6)).shape
    torch.Size([1, 12, 2, 3])
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = positive_int("block", block)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[-2] % self.block or x.shape[-1] % self.block:
            raise ValueError(
                f"InvertibleDownsample({self.block}) takes (b, c, h, w) with sides it divides, got {tuple(x.shape)}"
            )
        return space_to_depth(x, (self.block, self.block))

    def inverse(self, y: Tensor) -> Tensor:
        """The image whose blocks were moved."""
        return depth_to_space(y, (self.block, self.block))

    def extra_repr(self) -> str:
        return f"{self.block}"


class InvertibleUpsample(Permutation):
    """Move channels into blocks of s x s pixels: the inverse of `InvertibleDownsample`.

    Arguments:
        block: Side s of a block.

    Shape:
        (b, c s s, h, w), to (b, c, h s, w s).

    >>> import torch
    >>> InvertibleUpsample(2)(torch.zeros(1, 12, 2, 3)).shape
    torch.Size([1, 3, 4, 6])
    """

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = positive_int("block", block)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] % self.block**2:
            raise ValueError(
                f"InvertibleUpsample({self.block}) takes (b, c, h, w) with c that {self.block**2} divides, "
                f"got {tuple(x.shape)}"
            )
        return depth_to_space(x, (self.block, self.block))

    def inverse(self, y: Tensor) -> Tensor:
        """The channels that were moved."""
        return space_to_depth(y, (self.block, self.block))

    def extra_repr(self) -> str:
        return f"{self.block}"


def space_to_depth(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Permutation of (b, c, H h, W w) to (b, c h w, H, W) for blocks of h x w pixels; orthogonal.

    >>> import torch
    >>> space_to_depth(torch.arange(4.0).view(1, 1, 2, 2), (2, 2)).flatten()
    tensor([0., 1., 2., 3.])
    """
    if block == (1, 1):
        return x
    x = x.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # (b, c, H, h, W, w)
    return x.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)  # (b, c h w, H, W)


def depth_to_space(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Inverse and adjoint of `space_to_depth`: (b, c h w, H, W) to (b, c, H h, W w)."""
    if block == (1, 1):
        return x
    x = x.unflatten(1, (-1, *block))  # (b, c, h, w, H, W)
    return x.permute(0, 1, 4, 2, 5, 3).flatten(-2).flatten(-3, -2)  # (b, c, H h, W w)
