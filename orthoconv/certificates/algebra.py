"""How a function, and the rounding of its computation, grow from layer to layer."""

__all__ = ["UNIT", "Growth", "identity", "leaf", "product"]

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import overload

import torch

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # half the distance of 1 to the next number
_SMALLEST = {2.0**-24: 2.0**-126, 2.0**-53: 2.0**-1022}  # smaller numbers may become 0
_ROOM = 2.0**20  # of operations for each pair of an input and an output, or of entries for a sum: more than there are
_SAFETY = 1.01  # n u / (1 - n u) is less than this times n u, for sums of up to 100,000 terms in float32


@dataclass(frozen=True)
class Growth:
    """What is known of an exact function f, and of its computed form g, in the l2 norm.

    |f(x) - f(y)| <= lipschitz |x - y|, |f(0)| <= offset, and |g(x) - f(x)| <= relative |x| + absolute. The error holds
    for sums in any order (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3). A product is one function
    after another, a number times it a multiple, a sum the sum. `unknown` names the first part whose rounding nobody
    knows, if there is one; then only `lipschitz` and `offset` mean something.
    """

    unit: float
    lipschitz: float
    offset: float
    relative: float
    absolute: float
    unknown: str = ""

    @overload
    def error(self, norm: torch.Tensor) -> torch.Tensor: ...
    @overload
    def error(self, norm: float) -> float: ...
    def error(self, norm: torch.Tensor | float) -> torch.Tensor | float:
        """Bound of |g(x) - f(x)| for x of that norm."""
        if self.unknown:
            raise TypeError(
                f"there is no rounding rule for {self.unknown}; give it one with orthoconv.register_rule(..., "
                f"rounding=...), or do without by certify(..., rounding=False)"
            )
        return self.relative * norm + self.absolute

    def __mul__(self, after: "Growth") -> "Growth":
        carry = after.lipschitz + after.relative
        return Growth(
            self.unit,
            product(after.lipschitz, self.lipschitz),
            after.lipschitz * self.offset + after.offset,
            carry * self.relative + after.relative * self.lipschitz,
            carry * self.absolute + after.relative * self.offset + after.absolute,
            self.unknown or after.unknown,
        )

    def __rmul__(self, factor: float) -> "Growth":
        multiple = self._map(lambda part: abs(factor) * part)
        return multiple if factor == 1 else multiple._rounded(8)  # the factor may have been computed, too

    def __add__(self, other: "Growth") -> "Growth":
        return self._map(lambda a, b: a + b, other)._rounded(1)

    def beside(self, other: "Growth") -> "Growth":
        """Growth of two functions whose values are put side by side."""
        return self._map(math.hypot, other)

    def parallel(self, other: "Growth") -> "Growth":
        """Growth of two functions of two parts of the input, whose values are put side by side."""
        both = self.beside(other)
        return replace(
            both, lipschitz=max(self.lipschitz, other.lipschitz), relative=max(self.relative, other.relative)
        )

    def _map(self, f: Callable[..., float], *others: "Growth") -> "Growth":
        """Apply `f` to each part of this growth, and of the others beside it."""
        lipschitz, offset, relative, absolute = map(f, *(g._parts() for g in (self, *others)))
        unknown = next((g.unknown for g in (self, *others) if g.unknown), "")
        return Growth(self.unit, lipschitz, offset, relative, absolute, unknown)

    def _parts(self) -> tuple[float, float, float, float]:
        return self.lipschitz, self.offset, self.relative, self.absolute

    def _rounded(self, times: int) -> "Growth":
        e = 2 * times * self.unit
        relative, absolute = self.relative * (1 + e) + e * self.lipschitz, self.absolute * (1 + e) + e * self.offset
        absolute += times * _ROOM * _SMALLEST[self.unit]
        return Growth(self.unit, self.lipschitz, self.offset, relative, absolute, self.unknown)


def identity(unit: float) -> Growth:
    """Growth of the identity, which rounds nothing."""
    return Growth(unit, 1.0, 0.0, 0.0, 0.0)


def leaf(
    unit: float,
    lipschitz: float,
    units: float,
    value_at_zero: float,
    constants: float | None = None,
    pairs: int = 1,
) -> Growth:
    """Growth of one module, from its Lipschitz constant, its rounding in units, and the norm of its value at zero.

    `constants` is the norm of what the module adds, where its parts may cancel in the value at zero. `pairs` is the
    number of inputs times that of outputs. A module that rounds may also underflow, at each operation; what comes after
    that inside the module enlarges it by no more than its units and its constant.
    """
    offset, relative = _SAFETY * value_at_zero, _SAFETY * unit * units
    absolute = (relative + 8 * unit) * (offset if constants is None else constants)
    if units:
        absolute += _ROOM * pairs * _SMALLEST[unit] * (1 + units + lipschitz)
    return Growth(unit, lipschitz, offset, relative, absolute)


def product(a: float, b: float) -> float:
    """Product of two factors, which does not underflow to 0.

    >>> product(1e-200, -1e-200)
    -2.2250738585072014e-308
    """
    return math.copysign(max(abs(a * b), _SMALLEST[UNIT[torch.float64]]), a * b) if a and b else a * b
