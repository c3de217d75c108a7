"""Checks of arguments that layers share. Each error names the argument, its value and what is accepted."""

__all__ = ["Pair", "channel_axis", "check_dtype", "check_precision", "ints", "pair", "positive_int", "single", "triple"]

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]


def positive_int(name: str, value: object) -> int:
    """Return `value` as a positive int, or raise a ValueError that names the argument."""
    number = _int(value)
    if number is None or number < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return number


def pair(name: str, value: int | Sequence[int]) -> Pair:
    """Return a positive int twice, or a pair of them; otherwise raise a ValueError that names the argument."""
    both: Pair | None = ints(value)
    if both is None or min(both) < 1:
        raise ValueError(f"{name} must be a positive int or a pair of them, got {value!r}")
    return both


def triple(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    """Return a positive int three times, or a triple of them; otherwise raise a ValueError that names the argument."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = [_int(v) for v in value] if several else [_int(value)] * 3  # type: ignore[union-attr]
    if len(numbers) != 3 or any(n is None or n < 1 for n in numbers):
        raise ValueError(f"{name} must be a positive int or three of them, got {value!r}")
    return numbers[0], numbers[1], numbers[2]  # type: ignore[return-value]


def single(name: str, value: int | Sequence[int], least: int = 1) -> int:
    """Return an int, or that of a sequence of one; otherwise raise a ValueError that names the argument."""
    one = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1
    number = _int(value[0] if one else value)  # type: ignore[index]
    if number is None or number < least:
        raise ValueError(f"{name} must be an int of at least {least}, or a sequence of one, got {value!r}")
    return number


def ints(value: object, count: int = 2) -> Any:
    """Return an int twice, or a sequence of two ints as a pair, or of `count` ints; None for anything else."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    numbers = tuple(_int(v) for v in value) if several else (_int(value),) * count  # type: ignore[attr-defined]
    return numbers if len(numbers) == count and None not in numbers else None


def channel_axis(name: str, x: Tensor, dim: int | None) -> int:
    """Return the axis of the channels: `dim`, or by default 1, and 0 for a vector. Three axes need `dim`."""
    if x.ndim == 0 or (x.ndim == 3 and dim is None):
        raise ValueError(f"{name} needs dim= to know the channels of an input of shape {tuple(x.shape)}")
    axis = min(1, x.ndim - 1) if dim is None else dim % x.ndim
    if axis == 0 and x.ndim not in (1, 3):  # three axes may be an image without a batch
        raise ValueError(f"{name} with dim={dim} would mix the images of a batch of shape {tuple(x.shape)}")
    return axis


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` in the precision of the parameters. Only autocast may have changed it before."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if x.dtype != dtype and not (autocast and x.is_floating_point()):
        raise TypeError(f"{name} with parameters of {dtype} takes inputs of that dtype, got {x.dtype}")
    return x.to(dtype)


def check_precision(name: str, dtype: torch.dtype) -> None:
    """Raise a TypeError if no transform can be computed in the precision of the parameters."""
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} computes in torch.float32 or torch.float64, its parameters are {dtype}")


def _int(value: object) -> int | None:
    """Accept ints of Python and NumPy; return None for anything else, bools and tensors included."""
    if isinstance(value, bool | Tensor):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
