"""The learning rate over a run."""

__all__ = ["SCHEDULES", "linear", "piecewise_triangular"]

from collections.abc import Callable
from itertools import pairwise


def piecewise_triangular(t: float, highest: float) -> float:
    """Return the learning rate after the fraction `t` of a run.

    It rises linearly to `highest` in the first 40 % of the steps, falls to `highest` / 20 at 80 %, then to 0.

    Arguments:
        t: Fraction of the run, from 0 to 1.
        highest: Highest learning rate.

    >>> [round(piecewise_triangular(t, 1.0), 3) for t in (0.0, 0.2, 0.4, 0.8, 1.0)]
    [0.0, 0.5, 1.0, 0.05, 0.0]
    """
    return _interpolate(t, [(0.0, 0.0), (0.4, highest), (0.8, highest / 20), (1.0, 0.0)])


def linear(t: float, highest: float) -> float:
    """Return the learning rate after the fraction `t` of a run: a short rise, then a straight fall.

    It rises linearly to `highest` in the first 15 % of the steps, then falls linearly to 0.

    Arguments:
        t: Fraction of the run, from 0 to 1.
        highest: Highest learning rate.

    >>> [round(linear(t, 1.0), 3) for t in (0.0, 0.15, 0.575, 1.0)]
    [0.0, 1.0, 0.5, 0.0]
    """
    return _interpolate(t, [(0.0, 0.0), (0.15, highest), (1.0, 0.0)])


SCHEDULES: dict[str, Callable[[float, float], float]] = {"triangular": piecewise_triangular, "linear": linear}


def _interpolate(t: float, knots: list[tuple[float, float]]) -> float:
    for (a, low), (b, high) in pairwise(knots):
        if t <= b:
            return low + (high - low) * (t - a) / (b - a)
    return 0.0
