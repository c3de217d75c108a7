"""The C library's allocator, told to keep what is freed."""

__all__ = ["keep_freed_memory"]

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for itself, where its C library is glibc; returns whether it is.

    By default glibc asks the system for each large tensor and gives it back when the tensor is freed, so every step of
    training has the system clear the same pages again. With this, a step touches memory that the last one has left;
    in exchange, the process stays as large as it has been.

    >>> isinstance(keep_freed_memory(), bool)
    True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or none to ask
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 2**30) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
