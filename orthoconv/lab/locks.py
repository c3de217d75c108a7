"""A lock on the folder of a run, so that two commands never train the same configuration at once."""

__all__ = ["LockedError", "holder", "locked"]

import contextlib
import fcntl
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_NAME = "lock"


class LockedError(OSError):
    """Another process works on a folder; the message names the process, its host and its command."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, or refuse if another process holds it.

    The system drops the lock when its process ends in any way. So the file that a killed process left locks nothing,
    and the next process takes it over.

    Arguments:
        folder: Folder to lock. It is made if it does not exist, and removed again if nothing was written there.

    Raises:
        LockedError: If another process holds the lock.
    """
    path, new = folder / _NAME, not folder.exists()
    file, mine = _open(path)
    with file:
        if not mine:
            raise LockedError(f"{folder} is in use by {_read(file)}; wait for it, or stop it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}: {shlex.join(sys.argv)}".encode())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if new:
                with contextlib.suppress(OSError):  # it is not empty
                    folder.rmdir()


def holder(folder: Path) -> int | None:
    """Return the id of the process of this host that holds the lock of a folder, or None if nobody does."""
    path = folder / _NAME
    if not path.exists():
        return None
    with path.open("a+b") as file:
        if _take(file):
            return None
        text = _read(file)
    _, number, _, host, *_ = [*text.replace(":", " ").split(), "", "", "", ""]
    if not number.isdigit() or host != socket.gethostname():
        raise LockedError(f"{folder} is in use by {text}, which is not a process of this host")
    return int(number)


def _open(path: Path) -> tuple[BinaryIO, bool]:
    """Open the file of a lock and try to take it. If its holder has just removed it, or its folder: try again."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+b")
        except FileNotFoundError:
            continue
        if not _take(file):
            return file, False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, True
        file.close()


def _take(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace") or "another process"
