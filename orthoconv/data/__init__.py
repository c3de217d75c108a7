"""Data sets as tensors in [0, 1]."""

from orthoconv.data.digits import digits
from orthoconv.data.split import Split

__all__ = ["Split", "digits"]
