"""Files that are written whole or not at all, and the folder where downloads are kept."""

__all__ = ["bytes_of", "cache_dir", "read_json", "sha256", "write_atomically"]

import contextlib
import glob
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_ABANDONED = 3600  # seconds after which an incomplete file must be that of a process that died


def cache_dir() -> Path:
    """Return $ORTHOCONV_CACHE, or the user's cache directory."""
    if own := os.environ.get("ORTHOCONV_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orthoconv"


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the hexadecimal digest of named tensors, in any order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(bytes_of(tensors[name]))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise a ValueError that names the file."""
    try:
        value = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it has {type(value).__name__} where an object should be")
    return value


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file that appears at `path` complete, and on disk, or not at all.

    Two processes may write the same path at once: each writes a file of its own, and the last one stays. An incomplete
    file that a killed process left is removed an hour later.

    Arguments:
        path: File to write.
        content: Its bytes, or a function that writes them to a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with part.open("xb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it had no room for
        raise


def _remove_abandoned(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}"):
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - left.stat().st_mtime > _ABANDONED:
                left.unlink()
