"""Images of another size."""

__all__ = ["Size", "resized", "resized_split", "size_of"]

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from orthoconv.data.split import DataError, Split

Size = int | tuple[int, int]
_CHUNK = 1000
_MOST = 4096  # pixels of a side


def size_of(resize: object) -> tuple[int, int]:
    """Return height and width, from one number or from two.

    >>> size_of(32), size_of([24, 32])
    ((32, 32), (24, 32))
    """
    sides = (resize, resize) if isinstance(resize, int) else resize
    if (
        not isinstance(sides, tuple | list)
        or len(sides) != 2
        or not all(type(n) is int and 0 < n <= _MOST for n in sides)
    ):
        raise DataError(f"resize must be a number of pixels up to {_MOST}, or a height and a width, got {resize!r}")
    return sides[0], sides[1]


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images of that size: scaled until they cover it, and cut off evenly at both ends of the longer side.

    Arguments:
        images: Shape (n, c, h, w), bytes or floats.
        size: Height and width.

    >>> resized(torch.zeros(1, 3, 20, 40, dtype=torch.uint8), (8, 8)).shape
    torch.Size([1, 3, 8, 8])
    """
    h, w = images.shape[2:]
    if (h, w) == size:
        return images
    factor = max(size[0] / h, size[1] / w)
    scaled = (max(size[0], round(h * factor)), max(size[1], round(w * factor)))
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    pieces = []
    for piece in images.split(_CHUNK):
        floats = piece if images.is_floating_point() else piece.float()
        large = interpolate(floats, scaled, mode="bilinear", align_corners=False, antialias=True)
        cut = large[:, :, top : top + size[0], left : left + size[1]]
        pieces.append(cut if images.is_floating_point() else cut.round().clamp(0, 255).to(images.dtype))
    return torch.cat(pieces).contiguous()


def resized_split(split: Split, size: tuple[int, int]) -> Split:
    """Return a split whose images have that size."""
    return Split(resized(split.images, size), split.labels, split.classes)
