"""Checks of what `certify` is given."""

__all__ = ["iterable", "norms", "pair_of", "require_input"]

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor


def require_input(x: Tensor, shape: torch.Size) -> None:
    """Raise an error if inputs (b, ...) are not of that shape, or not finite."""
    if x.shape[1:] != shape:
        raise ValueError(f"certify takes inputs of one shape, got {tuple(x.shape[1:])} after {tuple(shape)}")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"certify takes finite inputs, got {int((~torch.isfinite(x)).sum())} entries that are not")


def norms(eps: Any) -> tuple[float, ...]:
    """Return norms of perturbations as numbers, one or several."""
    several = isinstance(eps, Iterable) and not (isinstance(eps, str) or getattr(eps, "ndim", 1) == 0)
    given = tuple(eps) if several else (eps,)
    for e in given:
        if isinstance(e, str) or not hasattr(e, "__float__"):
            raise TypeError(f"eps must be a number such as 36 / 255, or several, got {e!r}")
        if not float(e) >= 0:
            raise ValueError(f"eps must be at least 0, got {e!r}")
    return tuple(map(float, given))


def iterable(batches: Any) -> Iterable[Any]:
    """Return the batches if they can be iterated over."""
    if isinstance(batches, Iterable) or hasattr(batches, "__getitem__"):
        return cast("Iterable[Any]", batches)
    raise TypeError(f"certify takes batches such as [(x, labels)] or a DataLoader, got {reprlib.repr(batches)}")


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return a batch if it is two tensors, inputs (b, ...) and a label for each of them."""
    if not isinstance(batch, Sequence) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
        kinds = ", ".join(type(t).__name__ for t in batch) if isinstance(batch, tuple | list) else ""
        given = f"{type(batch).__name__} of {kinds}" if kinds else type(batch).__name__
        raise TypeError(
            f"each batch of certify must be two tensors, inputs (b, ...) and labels (b,), got a {given}; "
            f"one batch alone is [(x, labels)]"
        )
    x, y = batch
    if y.shape != x.shape[:1]:
        raise ValueError(
            f"certify takes one label for each input, got inputs {tuple(x.shape)} and labels {tuple(y.shape)}"
        )
    return x, y
