"""What every layer of this library says about itself."""

__all__ = ["Child", "Combination", "G", "Guarantee", "Layer", "Permutation"]

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol, TypeVar

from torch import Tensor, nn

Guarantee = Literal["orthogonal", "nonexpansive"]


class Layer(nn.Module, ABC):
    """Module that knows its Lipschitz constant, its rounding error, and its exported form; abstract.

    Certificates, export and verification ask these methods. `shape` is the shape of one input, without the batch.
    Modules that are not a `Layer` get a rule by `orthoconv.register_rule`.

    >>> class Half(Layer):
    ...     guarantee = "nonexpansive"
    ...
    ...     def forward(self, x):
    ...         return x / 2
    ...
    ...     def lipschitz(self, shape):
    ...         return 0.5
    ...
    ...     def rounding_units(self, shape):
    ...         return 0.0
    >>> from orthoconv import lipschitz_bound
    >>> lipschitz_bound(Half(), (3,))
    0.5
    """

    guarantee: ClassVar[Guarantee | None] = None  # what the class promises for any parameters

    @property
    def promise(self) -> Guarantee | None:
        """What this layer promises as it is configured; it may be less than the guarantee of its class."""
        return self.guarantee

    @abstractmethod
    def lipschitz(self, shape: Sequence[int]) -> float:
        """Upper bound of the Lipschitz constant, in exact arithmetic with the operator as it is."""

    @abstractmethod
    def rounding_units(self, shape: Sequence[int]) -> float:
        """Bound of |computed - exact| / |x| in units of rounding, to first order and without the bias."""

    def constants(self, shape: Sequence[int]) -> float | None:
        """Norm of what the layer adds inside, which rounds with it; None for the norm of its value at zero."""
        return None

    def in_double(self) -> nn.Module:
        """Return a copy that computes in float64, with the operator of the layer's own precision."""
        return copy.deepcopy(self).double()

    def exported(self, shape: Sequence[int]) -> nn.Module:
        """Return the layer as plain modules of torch in real arithmetic, for inputs of one shape."""
        return self


class Permutation(Layer):
    """Layer that moves the entries of its input, and rounds nothing; abstract."""

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 0.0


class Growing(Protocol):
    """Bounds of a function that certificates know how to combine; see `orthoconv.certificates.algebra.Growth`."""

    def __add__(self: "G", other: "G", /) -> "G":
        """Bounds of a sum."""

    def __rmul__(self: "G", factor: float, /) -> "G":
        """Bounds of a multiple."""

    def __mul__(self: "G", after: "G", /) -> "G":
        """Bounds of a function after this one."""

    def parallel(self: "G", other: "G", /) -> "G":
        """Bounds of two functions of two parts of the input, side by side."""


G = TypeVar("G", bound=Growing)
Child = Callable[[str, nn.Module, Tensor], G]  # the bounds of a part, by name, for an input


class Combination(nn.Module, ABC):
    """Module made of others, such as a residual connection, that knows how their bounds combine; abstract.

    >>> class Mean(Combination):
    ...     def __init__(self, f, g):
    ...         super().__init__()
    ...         self.f, self.g = f, g
    ...
    ...     def forward(self, x):
    ...         return (self.f(x) + self.g(x)) / 2
    ...
    ...     def growth(self, x, child):
    ...         return 0.5 * (child("f", self.f, x) + child("g", self.g, x))
    >>> from orthoconv import lipschitz_bound
    >>> lipschitz_bound(Mean(nn.ReLU(), nn.Identity()), (3,))
    1.0
    """

    copies_input: ClassVar[bool] = False  # whether each part gets a tensor of its own, which it may change

    @abstractmethod
    def growth(self, x: Tensor, child: Child[G]) -> G:
        """Combine the bounds of the parts, ``child(name, part, input)``, for an input `x` of zeros or constants."""
