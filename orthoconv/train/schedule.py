"""The learning rate over a run."""

__all__ = ["piecewise_triangular"]

from itertools import pairwise


def piecewise_triangular(t: float, highest: float) -> float:
    """Return the learning rate after the fraction `t` of a run.

    It rises linearly to `highest` in the first 40 % of the steps, falls to `highest` / 20 at 80 %, then to 0.

    >>> [round(piecewise_triangular(t, 1.0), 3) for t in (0.0, 0.2, 0.4, 0.8, 1.0)]
    [0.0, 0.5, 1.0, 0.05, 0.0]
    """
    knots = [(0.0, 0.0), (0.4, highest), (0.8, highest / 20), (1.0, 0.0)]
    for (a, low), (b, high) in pairwise(knots):
        if t <= b:
            return low + (high - low) * (t - a) / (b - a)
    return 0.0
