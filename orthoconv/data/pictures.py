"""Pictures of any kind as the images that a network takes: (b, c, h, w) in [0, 1]."""

__all__ = ["Picture", "as_images"]

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orthoconv.data.decoding import pixels_of, read_picture
from orthoconv.data.resizing import resized

Picture = Any  # a tensor, a NumPy array, a PIL image, the path of a file, or the bytes of one
_ROUNDING = 1e-5  # how far a float may be outside of [0, 1]
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue, as in ITU-R 601 and in Pillow


def as_images(
    pictures: Picture | Sequence[Picture], shape: Sequence[int] | None = None, resize: bool | Sequence[int] = False
) -> Tensor:
    """Return pictures as one batch of images (b, c, h, w) in [0, 1], float32 or float64.

    A tensor is taken as it is, (c, h, w) or (b, c, h, w). Everything else is a picture: NumPy arrays have their
    channels last, (h, w), (h, w, c), (b, h, w) or (b, h, w, c). Grey becomes RGB, or the reverse, if the network asks
    for it, and an alpha channel is dropped. Integers are bytes from 0 to 255, floats are in [0, 1].

    Arguments:
        pictures: A tensor, a NumPy array, a PIL image, the path of an image file, the bytes of one, or a list of these.
        shape: Channels, height and width that the network takes, if they are known.
        resize: Whether to scale images of another size to that of `shape`: until they cover it, then the longer side is
            cut off evenly at both ends; or the size.

    Raises:
        TypeError: If a picture is none of these, or has numbers of another kind.
        ValueError: If its size or its numbers are not what the network takes.
        DataError: If a file cannot be read as an image.

    >>> as_images(np.zeros((28, 28), dtype=np.uint8), (1, 28, 28)).shape
    torch.Size([1, 1, 28, 28])
    >>> as_images(torch.rand(3, 40, 50), (3, 32, 32), resize=True).shape
    torch.Size([1, 3, 32, 32])
    """
    size = None if shape is None else tuple(shape[1:])
    if resize is not False:
        size = _target(size, resize)
    many = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    if not many:
        raise ValueError("at least one image is needed, got an empty list")
    parts = [_fit(_tensor(p, None if shape is None else shape[0]), size, resize is not False) for p in many]
    if odd := [p for p in parts if p.shape[1:] != parts[0].shape[1:]]:
        raise ValueError(
            f"images of one call must have one shape, got {tuple(parts[0].shape[1:])} and {tuple(odd[0].shape[1:])}"
        )
    return torch.cat([p.to(parts[0].device) for p in parts])


def _tensor(picture: Picture, channels: int | None) -> Tensor:
    """Return one picture, or a batch, as floats (b, c, h, w) with that number of channels."""
    if isinstance(picture, Tensor):
        if picture.ndim not in (3, 4):
            raise ValueError(f"a tensor must be (c, h, w) or (b, c, h, w), got shape {tuple(picture.shape)}")
        x = _unit(picture if picture.ndim == 4 else picture[None])
        if channels is not None and x.shape[1] != channels:
            raise ValueError(f"the network takes images of {channels} channels, got a tensor {tuple(picture.shape)}")
        return x
    if isinstance(picture, str | os.PathLike | bytes):
        return _with_channels(_unit(read_picture(picture, channels)[None]), channels)
    if type(picture).__module__.startswith("PIL."):
        return _with_channels(_unit(pixels_of(picture, channels)[None]), channels)
    if not isinstance(picture, np.ndarray):
        raise TypeError(
            f"an image must be a tensor, a NumPy array, a PIL image, the path of a file or its bytes, "
            f"got {type(picture).__name__}"
        )
    return _with_channels(_channels_first(picture, channels), channels)


def _channels_first(array: np.ndarray[Any, Any], channels: int | None) -> Tensor:
    """Return a NumPy array (h, w), (h, w, c), (b, h, w) or (b, h, w, c) as floats (b, c, h, w)."""
    shape = array.shape
    if array.ndim == 2:
        array = array[None, :, :, None]
    elif array.ndim == 3 and shape[2] in (1, 3, 4):
        array = array[None]
    elif array.ndim == 3 and (channels == 1 or shape[0] not in (1, 3, 4)):
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3, 4):
        raise ValueError(
            f"a NumPy array must be (h, w), (h, w, c), (b, h, w) or (b, h, w, c) with 1, 3 or 4 channels, got shape "
            f"{shape}; give torch.from_numpy(array) if its channels come first"
        )
    try:
        return _unit(torch.from_numpy(np.array(array))).permute(0, 3, 1, 2).contiguous()
    except TypeError as error:
        raise TypeError(f"an image must have bytes from 0 to 255 or floats in [0, 1], got {array.dtype}") from error


def _unit(x: Tensor) -> Tensor:
    """Return bytes, or floats in [0, 1], as floats of 32 bits or more."""
    if x.dtype == torch.uint8:
        return x.to(torch.float32) / 255
    if not x.is_floating_point():
        raise TypeError(f"an image must have bytes from 0 to 255 (uint8) or floats in [0, 1], got {x.dtype}")
    x = x.detach() if x.dtype == torch.float64 else x.detach().float()
    if x.numel() == 0:
        raise ValueError(f"an image must have pixels, got shape {tuple(x.shape)}")
    low, high = x.min().item(), x.max().item()
    if not (low >= -_ROUNDING and high <= 1 + _ROUNDING):
        raise ValueError(
            f"an image of floats must be in [0, 1], got values from {low:.4g} to {high:.4g}; give bytes as uint8"
        )
    return x


def _with_channels(x: Tensor, channels: int | None) -> Tensor:
    """Convert pictures (b, c, h, w) of 1, 3 or 4 channels to grey or RGB."""
    x = x[:, :3]  # without alpha
    if channels in (None, x.shape[1]):
        return x
    if channels == 3:
        return x.expand(-1, 3, -1, -1)
    if channels == 1:
        return (x * x.new_tensor(_LUMA)[:, None, None]).sum(1, keepdim=True).clamp(0, 1)
    raise ValueError(f"a picture is grey or in colour; the network takes {channels} channels, so give it a tensor")


def _target(size: tuple[int, ...] | None, resize: bool | Sequence[int]) -> tuple[int, ...]:
    if resize is not True:
        if (
            not isinstance(resize, Sequence)
            or len(resize) != 2
            or not all(isinstance(n, int) and n > 0 for n in resize)
        ):
            raise ValueError(f"resize must be True, False, or a height and a width, got {resize!r}")
        return tuple(resize)
    if size is None:
        raise ValueError("resize=True needs a network that knows its size; give resize=(height, width)")
    return size


def _fit(x: Tensor, size: tuple[int, ...] | None, resize: bool) -> Tensor:
    """Scale images to a size, or refuse them if they have another one."""
    if size is None or tuple(x.shape[2:]) == size:
        return x
    if not resize:
        raise ValueError(
            f"the network takes images of {size[0]} x {size[1]} pixels (height x width), got "
            f"{x.shape[2]} x {x.shape[3]}; resize=True scales them"
        )
    return _scaled(x, size)


def _scaled(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Scale images as those of data sets are, by `resized`; bytes stay bytes."""
    y = resized(x, (size[0], size[1])).clamp(0, 1)
    are_bytes = bool(((255 * x).round() / 255 - x).abs().max() < _ROUNDING)
    return (255 * y).round() / 255 if are_bytes else y
