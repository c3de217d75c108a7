"""A process that holds a lock, for the tests of locks and of the queue."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orthoconv.lab import locks
from orthoconv.lab.locks import holder


def comes_true(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether a condition holds before that much time has passed; a busy machine takes its time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


HOLD = """
import importlib.util, pathlib, sys, time
spec = importlib.util.spec_from_file_location("locks", sys.argv[1])
locks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(locks)
with locks.locked(pathlib.Path(sys.argv[2])):
    time.sleep(60)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen]:
    """A process that holds the lock until it is killed; it imports nothing else, which would take seconds."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, locks.__file__, str(folder)])
    try:
        assert comes_true(lambda: holder(folder) == process.pid, seconds=60)
        yield process
    finally:
        process.kill()
        process.wait()
