"""Orthogonal matrices from unconstrained ones."""

from collections.abc import Callable

from torch import Tensor

from orthoconv.linalg.cayley_transform import cayley, cayley_linear, cayley_preimage, is_large, pivot_signs
from orthoconv.linalg.exponential import exponential_terms, skew_exponential
from orthoconv.linalg.nearest import bjorck, bjorck_linear, polar, polar_linear
from orthoconv.linalg.norms import (
    frobenius_norm,
    gram,
    gram_factor,
    lower_gram,
    norm_bound,
    row_norms,
    spectral_norm,
    weight_norm,
    without_noise,
)
from orthoconv.linalg.reflection import orthonormal, reflect, resized

Orthogonalizer = Callable[[Tensor], Tensor]
"""Function of matrices (..., m, n) to orthogonal ones of the same shape, such as `cayley`.

>>> from orthoconv.linalg import bjorck, orthogonalizer
>>> orthogonalizer("bjorck") is bjorck
True
"""

__all__ = [
    "Orthogonalizer",
    "bjorck",
    "bjorck_linear",
    "cayley",
    "cayley_linear",
    "cayley_preimage",
    "exponential_terms",
    "frobenius_norm",
    "gram",
    "gram_factor",
    "is_large",
    "lower_gram",
    "norm_bound",
    "orthogonalizer",
    "orthonormal",
    "pivot_signs",
    "polar",
    "polar_linear",
    "reflect",
    "resized",
    "row_norms",
    "skew_exponential",
    "spectral_norm",
    "weight_norm",
    "without_noise",
]


def orthogonalizer(name: str) -> Orthogonalizer:
    """The function called `name`: "bjorck" or "cayley".

    Arguments:
        name: "bjorck" or "cayley".

    >>> orthogonalizer("cayley") is cayley
    True
    """
    functions: dict[str, Orthogonalizer] = {"bjorck": bjorck, "cayley": cayley}
    if name not in functions:
        raise ValueError(f"orthogonalizer must be one of {', '.join(map(repr, functions))}, got {name!r}")
    return functions[name]
