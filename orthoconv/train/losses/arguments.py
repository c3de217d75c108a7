"""Checks that the losses share. Each error names the argument, the value that was given and what is accepted.

Values of tensors are read on a CPU only. An accelerator would have to wait for them at each step, and a trace has none.
"""

__all__ = ["at_least_zero", "checked_classes", "checked_constants", "checked_labels", "floating", "positive", "share",
           "tensor"]  # fmt: skip

import math
import reprlib
from typing import Any

from torch import Tensor

from orthoconv import budget
from orthoconv.margins import check_labels, integer_labels
from orthoconv.modules import require_number
from orthoconv.tracing import is_eager, is_traced


def positive(name: str, value: float) -> float:
    """Return `value` if it is positive and finite."""
    _number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return value


def at_least_zero(name: str, value: float) -> float:
    """Return `value` if it is at least 0 and finite."""
    _number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")
    return value


def share(name: str, value: float) -> float:
    """Return `value` if it is from 0 to 1."""
    _number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value!r}")
    return value


def floating(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor of floating point numbers."""
    if not tensor(name, value).is_floating_point():
        raise TypeError(f"{name} must be of floating point numbers, got {value.dtype}")
    return value  # type: ignore[no-any-return]


def checked_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the labels as int64, if logits (b, classes) and labels (b,) are what a loss of several classes takes."""
    floating("logits", logits), tensor("labels", labels)
    if logits.ndim != 2 or logits.shape[0] < 1 or logits.shape[1] < 2 or labels.shape != logits.shape[:1]:
        two = logits.ndim == 1 or (logits.ndim == 2 and logits.shape[1] == 1)
        raise ValueError(
            "the loss needs logits (b, classes) and labels (b,), of one image or more and two classes or more, "
            f"got {tuple(logits.shape)} and {tuple(labels.shape)}"
            + ("; for one score of two classes there are kr_loss and hkr_loss" if two else "")
        )
    return checked_classes(labels, logits.shape[1])


def checked_classes(labels: Any, classes: int) -> Tensor:
    """Return the labels as int64, if they are integers and, where they may be read, from 0 to classes - 1."""
    indices = integer_labels(tensor("labels", labels))
    if _is_readable(indices):
        check_labels(indices, classes)
    return indices


def checked_constants(constants: Any, classes: int) -> Tensor:
    """Return the constants if they are (classes, classes) and, where they may be read, none is below 0.

    The diagonal does not count, since no loss uses it. What is not finite makes a loss that is not finite.
    """
    if tensor("constants", constants).shape != (classes, classes):
        raise ValueError(f"constants must have the shape ({classes}, {classes}), got {tuple(constants.shape)}")
    if _is_readable(constants):
        pairs = constants.detach().clone().fill_diagonal_(0)
        if (pairs < 0).any():
            raise ValueError(f"constants must be at least 0, got {pairs[pairs < 0].min().item()}")
    return constants  # type: ignore[no-any-return]


def tensor(name: str, value: Any) -> Tensor:
    """Return `value` if it is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {reprlib.repr(value)}")
    return value


def _number(name: str, value: Any) -> None:
    """Raise an error unless `value` is a number; torch.compile cannot ask what a number has that changes."""
    if not is_traced():
        require_number(name, value)


def _is_readable(t: Tensor) -> bool:
    """Whether the values of `t` may be read without a wait."""
    return is_eager(t) and budget.has_cache(t.device)
