"""What a new layer starts from: the weights of the old one, or the neighbourhood of the identity."""

__all__ = ["keep_weights", "start_near_identity"]

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.nn import CayleyConv2d, CayleyLinear
from orthoconv.nn.downsample import space_to_depth
from orthoconv.nn.image_layer import ImageLayer
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.origins import block_kernel

_NOISE = 0.1  # of the entries that an old kernel does not have: a matrix of lower rank has no nearest orthogonal one
_NEAR = 0.1  # of the usual scale of a Cayley kernel; measured in docs/conversion.md


@torch.no_grad()
def start_near_identity(new: nn.Module, old: nn.Module) -> None:
    """Make the kernel W of a Cayley layer small: cayley(W) is the identity on the first channels, up to 2 |W|.

    A random orthogonal layer from 6 c channels to c keeps 1/6 of the squared norm, whatever comes before it. Near the
    identity it keeps what a layer from c to 6 c has put there; and a kernel near its centre tap loses nothing at a
    border of zeros. The kernel stays random, so that all channels learn. Layers of other methods stay as they are.
    """
    if isinstance(new, CayleyConv2d | CayleyLinear):
        new.g.mul_(_NEAR)


@torch.no_grad()
def keep_weights(new: nn.Module, old: nn.Module) -> None:
    """Copy the weight and the bias of a layer into `new`, a layer that projects its weight on the orthogonal ones.

    A convolution with stride s has ``max(1, k // s)`` taps of s x s blocks of pixels. What the old kernel has there is
    copied. Its taps beyond, such as the first row of a kernel of 3 with stride 2, are left out. Where it has none, such
    as a kernel of 1 with stride 2, there is noise, since the orthogonal layer uses all pixels of a block.
    """
    if not isinstance(old.weight, Tensor) or not isinstance(new, ImageLayer | BaseLinear):
        raise ValueError(f"its weights cannot be kept: {type(old).__name__} has none that could be copied")
    weight = old.weight.detach().to(new.weight)
    if isinstance(new, ImageLayer):
        padding: Any = getattr(old, "padding", "same")
        weight = weight if weight.ndim > 3 else weight[:, :, None]
        volumes = weight.ndim == 5
        weight = _volumes(weight, new) if volumes else _blocks(weight, new.stride, new.kernel_shape[2:], padding)
    new.weight.copy_(weight)
    if new.bias is not None and isinstance(old.bias, Tensor):
        new.bias.copy_(old.bias.detach())


def _blocks(kernel: Tensor, stride: Sequence[int], taps: Sequence[int], padding: str | Sequence[int]) -> Tensor:
    """Kernel (o, i sh sw, *taps) of blocks of pixels, from a kernel (o, i, kh, kw) with that stride."""
    filled = torch.ones_like(kernel)
    for axis, s, t in zip((-2, -1), stride, taps, strict=True):
        if s > 1:
            k = kernel.shape[axis]
            given = (0, *padding)[axis] if isinstance(padding, Sequence) and not isinstance(padding, str) else None
            start = s * ((t - 1) // 2) - ((k - 1) // 2 if given is None else min(given, k - 1))
            sides = (start, s * t - start - k)
            kernel, filled = (F.pad(w.movedim(axis, -1), sides).movedim(-1, axis) for w in (kernel, filled))
    return space_to_depth(_completed(kernel, filled), (stride[0], stride[1]))


def _volumes(kernel: Tensor, new: ImageLayer) -> Tensor:
    """Kernel of blocks of voxels, from a kernel (o, i, kd, kh, kw) that is centred on them."""
    return _completed(*(block_kernel(w, new.geometry) for w in (kernel, torch.ones_like(kernel))))


def _completed(kernel: Tensor, filled: Tensor) -> Tensor:
    """The kernel with noise where it has no entries."""
    return kernel + _NOISE * kernel.std() * torch.randn_like(kernel) * (1 - filled)
