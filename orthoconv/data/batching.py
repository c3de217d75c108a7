"""Batches of a data set in memory. Shuffling and augmentation depend on nothing but a seed."""

__all__ = ["augment", "batches", "epoch_order", "generator"]

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from orthoconv.data.arrays import as_split, tensor_of
from orthoconv.data.split import Split


def epoch_order(n: int, seed: int, epoch: int) -> Tensor:
    """Return the order of `n` examples in an epoch."""
    return torch.randperm(n, generator=generator(seed, epoch))


def generator(*numbers: int) -> torch.Generator:
    """Return a source of random numbers that depends on `numbers` alone."""
    seed = 0
    for number in numbers:
        seed = (seed * 6364136223846793005 + number + 1442695040888963407) % 2**63
    return torch.Generator().manual_seed(seed)


def batches(split: Split | tuple[Any, Any], size: int) -> Iterator[Split]:
    """Yield the split in order, in pieces of at most `size` images.

    Arguments:
        split: A split; or a pair of images and labels, whatever `as_split` takes.
        size: Most images in a piece.

    >>> [len(labels) for _, labels in batches(Split(torch.rand(5, 1, 8, 8), torch.arange(5)), 2)]
    [2, 2, 1]
    """
    split = split if isinstance(split, Split) else as_split(*split)
    for images, labels in zip(split.images.split(size), split.labels.split(size), strict=True):
        yield Split(images, labels, split.classes)


def augment(images: Any, source: torch.Generator, pad: int = 4, flip: bool = True) -> Tensor:
    """Crop each image at random after padding it by reflection, and mirror half of them, if `flip`.

    Arguments:
        images: Tensor or array of shape (b, c, h, w), bytes or floats, on any device; they are moved there.
        source: Source of the random numbers, on the CPU: they are the same on every device.
        pad: Largest shift, in pixels.
        flip: Whether to mirror half of them; not for digits or letters, whose mirror image is another thing.

    >>> augment(torch.rand(2, 3, 8, 8), torch.Generator()).shape
    torch.Size([2, 3, 8, 8])
    """
    images = tensor_of("images", images)
    b, c, h, w = images.shape
    if min(h, w) <= pad:
        raise ValueError(f"augment moves images by up to {pad} pixels, which must be larger, got {h} x {w}")
    shift = torch.randint(-pad, pad + 1, (2, b, 1), generator=source).to(images.device)
    rows = _reflect(torch.arange(h, device=images.device) + shift[0], h)  # (b, h)
    columns = torch.arange(w, device=images.device) + shift[1]
    if flip:
        mirrored = torch.randint(2, (b, 1), generator=source).to(images.device)
        columns = torch.where(mirrored == 1, columns.flip(1), columns)
    columns = _reflect(columns, w)  # (b, w)
    pixels = (rows[:, :, None] * w + columns[:, None, :]).view(b, 1, h * w).expand(b, c, h * w)
    moved: Tensor = images.flatten(2).gather(2, pixels).view(b, c, h, w)
    return moved


def _reflect(index: Tensor, n: int) -> Tensor:
    return (n - 1) - ((n - 1) - index.abs()).abs()
