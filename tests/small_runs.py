"""A run in a folder, as `orthoconv train` would leave it, but made at once; and pictures for it."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from orthoconv import models
from orthoconv.data import Split
from orthoconv.models.trained import build_arguments
from orthoconv.train import save_weights

LAYERS = ["conv 8", "maxmin", "flatten", "linear 32", "maxmin", "head"]


def run_folder(folder: Path, **config: Any) -> Path:
    """The folder of a run with three classes of grey images of 8 x 8."""
    split = Split(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 2]))
    arguments = build_arguments({"name": "custom", "conv": "cayley", "layers": LAYERS}, split)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"network": arguments, **config}))
    save_weights(folder / "model.safetensors", models.build(**arguments), {"network": arguments, **config})
    return folder


def picture(*shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG") -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind)
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that claims to have side x side pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )
