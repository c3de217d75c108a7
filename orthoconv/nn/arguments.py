"""Checks of arguments that layers share. Each error names the argument, its value and what is accepted."""

__all__ = [
    "Pair",
    "axis",
    "channel_axis",
    "check_dtype",
    "check_floating",
    "check_image",
    "check_precision",
    "check_tensor",
    "check_trainable",
    "flag",
    "ints",
    "module",
    "modules",
    "number",
    "pair",
    "positive_int",
    "single",
    "triple",
]

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

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


def flag(name: str, value: object) -> bool:
    """Return True or False, Python's or NumPy's, as a bool; otherwise raise a ValueError that names the argument."""
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not isinstance(value, bool) and not of_numpy:
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def number(name: str, value: object, accepted: str, fits: Callable[[float], bool]) -> float:
    """Return a number of any library as a float, or raise a ValueError that names the argument.

    Arguments:
        name: Name of the argument.
        value: What was given for it.
        accepted: What the error says that it must be.
        fits: Whether a number is accepted.
    """
    try:
        found = None if isinstance(value, bool | str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's, for tensors of several numbers
        found = None
    if found is None or not fits(found):
        raise ValueError(f"{name} must be {accepted}, got {value!r}")
    return found


def axis(name: str, value: object) -> int:
    """Return an axis, an int of either sign; otherwise raise a ValueError that names the argument."""
    found = _int(value)
    if found is None:
        raise ValueError(f"{name} must be an int, got {value!r}")
    return found


def module(name: str, value: object) -> nn.Module:
    """Return a module, or raise a ValueError that names the argument."""
    if not isinstance(value, nn.Module):
        raise ValueError(f"{name} must be a module, got {value!r}")
    return value


def modules(name: str, values: Iterable[nn.Module], kind: str = "module") -> list[nn.Module]:
    """Return one module or more as a list, or raise a ValueError that names the argument and what it is a list of."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of one {kind} or more, got {values!r}")
    found = list(values)
    if not found:
        raise ValueError(f"{name} must be one {kind} or more, got none")
    if bad := [value for value in found if not isinstance(value, nn.Module)]:
        raise ValueError(f"{name} must be modules, got {bad[0]!r}")
    return found


def channel_axis(name: str, x: Tensor, dim: int | None) -> int:
    """Return the axis of the channels: `dim`, or by default 1, and 0 for a vector. Three axes need `dim`."""
    check_tensor(name, x)
    if x.ndim == 0 or (x.ndim == 3 and dim is None):
        raise ValueError(f"{name} needs dim= to know the channels of an input of shape {tuple(x.shape)}")
    if dim is not None and not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name} with dim={dim} takes inputs that have this axis, got shape {tuple(x.shape)}")
    found = min(1, x.ndim - 1) if dim is None else dim % x.ndim
    if found == 0 and x.ndim not in (1, 3):  # three axes may be an image without a batch
        raise ValueError(f"{name} with dim={dim} would mix the images of a batch of shape {tuple(x.shape)}")
    return found


def check_tensor(name: str, x: object) -> None:
    """Raise a TypeError if the input of a layer is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a tensor, got {'None' if x is None else f'a {type(x).__name__}'}")


def check_image(name: str, shape: Sequence[int]) -> None:
    """Raise a ValueError if an input of that shape has no height and width."""
    if len(shape) < 2:
        raise ValueError(f"{name} takes images (..., h, w), got shape {tuple(shape)}")


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


def check_trainable(name: str, dtype: torch.dtype | None) -> None:
    """Raise a TypeError if the parameters of a layer cannot have that precision; None is torch's default."""
    found = torch.get_default_dtype() if dtype is None else dtype
    if found not in (torch.float32, torch.float64):
        default = ", the default of torch" if dtype is None else ""
        raise TypeError(f"{name} takes dtype=torch.float32 or torch.float64, got {found!r}{default}")


def check_floating(name: str, dtype: torch.dtype | None) -> None:
    """Raise a TypeError if a part that computes in any precision gets a dtype that is none."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name} takes the dtype of floating-point numbers, got {dtype!r}")


def _int(value: object) -> int | None:
    """Accept ints of Python and NumPy; return None for anything else, bools and tensors included."""
    if isinstance(value, bool | Tensor):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
