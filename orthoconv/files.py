"""Files that are written whole or not at all, and a place to keep them."""

__all__ = ["bytes_of", "cache_dir", "sha256", "write_atomically"]

import contextlib
import glob
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_LEFT = 3600  # seconds after which a file that is still not complete was left by a process that died


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

    Two processes that do so at once each write their own file, and the last one stays. What a killed process left of
    its own is removed an hour later.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk says of itself which file it was too small for
        raise


def _remove_left(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - left.stat().st_mtime > _LEFT:
                left.unlink()
