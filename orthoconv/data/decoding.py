"""Image files as pixels: the one place where Pillow decodes them."""

__all__ = ["SUFFIXES", "pixels_of", "read_picture"]

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orthoconv.data.split import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # Pillow would run a program for some of the others
_MOST_PIXELS = 100_000_000


def read_picture(
    source: str | os.PathLike[str] | bytes, channels: int | None = None, most: int = _MOST_PIXELS
) -> Tensor:
    """Decode an image file with Pillow; a photograph is turned upright.

    Arguments:
        source: Path of the file, or its bytes.
        channels: 1 for grey, any other number for colour; by default what the file has.
        most: Pixels that the image may have; one with more is refused before it is decoded.

    Returns:
        Bytes (c, h, w), of one channel or of three.

    Raises:
        DataError: If there is no such file, or if it is not an image of a format that is known.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise DataError('reading image files needs Pillow: pip install "orthoconv[lab]"') from error
    name = "the image" if isinstance(source, bytes) else str(source)
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise DataError(f"{name} is a folder, not an image" if Path(source).is_dir() else f"{name} does not exist")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
            if image.width * image.height > most:
                raise ValueError(f"it has {image.width} x {image.height} pixels, more than {most}")
            return pixels_of(ImageOps.exif_transpose(image), channels)
    except Exception as error:  # whatever a file of any bytes makes a decoder raise
        reason = "it is not in a format that is known" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{name} cannot be read as an image ({', '.join(_FORMATS)}): {reason}") from error


def pixels_of(image: Any, channels: int | None = None) -> Tensor:
    """Return a PIL image as bytes (c, h, w), grey or in colour; numbers of 16 bits are scaled to bytes.

    >>> from PIL import Image
    >>> pixels_of(Image.new("RGB", (5, 4))).shape, pixels_of(Image.new("L", (5, 4)), 3).shape
    (torch.Size([3, 4, 5]), torch.Size([3, 4, 5]))
    """
    if image.mode == "F":
        raise ValueError("its pixels are floats, whose range nobody knows; give an array in [0, 1]")
    if image.mode.startswith("I"):  # 16 bits, from 0 to 65535, which Pillow would cut off at 255
        grey = torch.from_numpy(np.array(image.convert("I")))[None]
        return (grey / 257).round().clamp(0, 255).to(torch.uint8).expand(1 if channels in (None, 1) else 3, -1, -1)
    is_grey = image.mode in ("L", "1") if channels is None else channels == 1
    pixels = torch.from_numpy(np.array(image.convert("L" if is_grey else "RGB")))  # (h, w) or (h, w, 3)
    return pixels[None] if is_grey else pixels.permute(2, 0, 1)
