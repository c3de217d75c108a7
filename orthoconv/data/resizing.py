"""Images of another size."""

__all__ = ["Size", "resized", "resized_split", "size_of"]

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from orthoconv.data.split import DataError, Split

Size = int | tuple[int, int]
_CHUNK = 1000
_MOST = 4096  # pixels of a side
_BAND = 64  # pixels that are scaled at once; the weights of more are mostly zeros


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
    pieces = []
    for piece in images.split(_CHUNK):
        for axis in (0, 1):  # at most one of them is longer than wanted
            if scaled[axis] > size[axis]:
                piece = _middle(piece, axis, scaled[axis], size[axis])
        floats = piece if piece.is_floating_point() else piece.float()
        done = interpolate(floats, size, mode="bilinear", align_corners=False, antialias=True)
        pieces.append(done if images.is_floating_point() else done.round().clamp(0, 255).to(images.dtype))
    return torch.cat(pieces).contiguous()


def _middle(images: Tensor, axis: int, scaled: int, size: int) -> Tensor:
    """Scale one side of images to `scaled` pixels, but compute only the `size` pixels in its middle.

    The weights are those of `interpolate` with antialias. A side of millions of pixels then takes no more memory than
    the part of it that is seen.

    Arguments:
        images: Shape (n, c, h, w).
        axis: 0 for the height, 1 for the width.
        scaled: Pixels of that side after scaling.
        size: Pixels that are kept.
    """
    n, first = images.shape[2 + axis], (scaled - size) // 2
    step = n / scaled  # pixels of the image for one of the result
    reach = max(step, 1.0)
    parts = []
    for rows in torch.arange(first, first + size, dtype=torch.float64).split(_BAND):
        centers = (rows + 0.5) * step
        start, end = max(int(centers[0] - reach), 0), min(int(centers[-1] + reach) + 1, n)
        source = images.narrow(2 + axis, start, end - start)
        source = source if source.is_floating_point() else source.float()
        distances = torch.arange(start, end, dtype=torch.float64) + 0.5 - centers[:, None]  # (rows, part of the side)
        weights = (1 - distances.abs() / reach).clamp(min=0)
        weights = (weights / weights.sum(1, keepdim=True)).to(source)
        parts.append(weights @ source if axis == 0 else source @ weights.mT)
    return torch.cat(parts, 2 + axis)


def resized_split(split: Split, size: tuple[int, int]) -> Split:
    """Return a split whose images have that size."""
    return Split(resized(split.images, size), split.labels, split.classes)
