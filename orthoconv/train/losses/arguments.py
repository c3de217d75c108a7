"""Checks of constants that the losses share. Each error names the constant, its value and what is accepted."""

__all__ = ["at_least_zero", "positive", "share"]

import math


def positive(name: str, value: float) -> float:
    """Return `value` if it is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return value


def at_least_zero(name: str, value: float) -> float:
    """Return `value` if it is at least 0 and finite."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")
    return value


def share(name: str, value: float) -> float:
    """Return `value` if it is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value!r}")
    return value
