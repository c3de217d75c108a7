"""Radii rounded down: what is certified must not grow by rounding."""

__all__ = ["certain", "rounded_down"]

import torch
from torch import Tensor


def rounded_down(radius: Tensor, dtype: torch.dtype) -> Tensor:
    """Return non-negative numbers in a precision, less than they were by up to four units in the last place.

    >>> rounded_down(torch.tensor([1 / 3], dtype=torch.float64), torch.float32).double() < 1 / 3
    tensor([True])
    """
    info = torch.finfo(dtype)
    low = (radius * (1 - 2 * info.eps) - info.tiny).clamp_min(0)
    return torch.where(low.isinf(), low, low.clamp_max(info.max)).to(dtype)  # a finite radius stays finite


def certain(radius: Tensor, logits: Tensor) -> Tensor:
    """Return radii (b,) that are 0 where a logit (b, classes) is not finite, and finite where they have overflowed."""
    known = logits.isfinite().all(1) & ~radius.isnan()
    return torch.where(known, radius.clamp_max(torch.finfo(logits.dtype).max), 0)
