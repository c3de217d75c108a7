"""Downloads."""

__all__ = ["fetch"]

import hashlib
import urllib.request
from collections.abc import Callable

from orthoconv.data.split import DataError, Progress


def fetch(url: str, md5: str, write: Callable[[bytes], object], progress: Progress | None = None) -> None:
    """Pass the bytes at `url` to `write`, block by block, and raise a DataError if their MD5 is another one."""
    done, digest = 0, hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=30) as response:
        total = int(response.headers.get("Content-Length") or 0)
        while block := response.read(1 << 20):
            write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    if digest.hexdigest() != md5:
        raise DataError(f"the archive has the MD5 {digest.hexdigest()}, not {md5}")
