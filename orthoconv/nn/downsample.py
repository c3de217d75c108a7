"""Invertible downsampling: blocks of pixels become channels (Section 5.1; Jacobsen et al., i-RevNet, 2018)."""

__all__ = ["depth_to_space", "space_to_depth"]

from torch import Tensor


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
