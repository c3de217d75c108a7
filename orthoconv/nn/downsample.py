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
        return space_to_depth(
            _with_sides(x, self.block, f"InvertibleDownsample({self.block})"), (self.block, self.block)
        )

    def inverse(self, y: Tensor) -> Tensor:
        """The image whose blocks were moved."""
        name = f"the inverse of InvertibleDownsample({self.block})"
        return depth_to_space(_with_channels(y, self.block, name), (self.block, self.block))

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
        return depth_to_space(
            _with_channels(x, self.block, f"InvertibleUpsample({self.block})"), (self.block, self.block)
        )

    def inverse(self, y: Tensor) -> Tensor:
        """The channels that were moved."""
        name = f"the inverse of InvertibleUpsample({self.block})"
        return space_to_depth(_with_sides(y, self.block, name), (self.block, self.block))

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


def _with_sides(x: Tensor, block: int, name: str) -> Tensor:
    """Return (b, c, h, w) if blocks divide the image; otherwise raise an error that says who takes it."""
    if x.ndim != 4 or x.shape[-2] % block or x.shape[-1] % block:
        raise ValueError(f"{name} takes (b, c, h, w) with sides that {block} divides, got {tuple(x.shape)}")
    return x


def _with_channels(x: Tensor, block: int, name: str) -> Tensor:
    """Return (b, c, h, w) if the channels are whole blocks; otherwise raise an error that says who takes them."""
    if x.ndim != 4 or x.shape[1] % block**2:
        raise ValueError(f"{name} takes (b, c, h, w) with c that {block**2} divides, got {tuple(x.shape)}")
    return x
