"""The learning rate over a run."""

__all__ = ["piecewise_triangular"]

from itertools import pairwise


def piecewise_triangular(t: float, highest: float) -> float:
    """Learning rate after the fraction `t` of a run: 0, up to `highest` at 2/5, to a 20th of it at 4/5, and to 0.

    >>> [round(piecewise_triangular(t, 1.0), 3) for t in (0.0, 0.2, 0.4, 0.8, 1.0)]
    [0.0, 0.5, 1.0, 0.05, 0.0]
    """
    knots = [(0.0, 0.0), (0.4, highest), (0.8, highest / 20), (1.0, 0.0)]
    for (a, low), (b, high) in pairwise(knots):
        if t <= b:
            return low + (high - low) * (t - a) / (b - a)
    return 0.0
