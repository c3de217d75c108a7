"""Files that are written whole or not at all, and a place to keep them."""

__all__ = ["bytes_of", "cache_dir", "sha256", "write_atomically"]

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor


def cache_dir() -> Path:
    """$ORTHOCONV_CACHE, or the user's cache directory."""
    if own := os.environ.get("ORTHOCONV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orthoconv"


def bytes_of(tensor: Tensor) -> memoryview:
    """What a tensor holds, as bytes."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """Digest of named tensors, in hexadecimal, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a file that appears at `path` complete, and on disk, or not at all.

    Two processes that do so at once each write their own file, and the last one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
