"""Orthogonal linear layers by Bjorck's iteration (Anil, Lucas and Grosse, Sorting out Lipschitz functions, 2019)."""

__all__ = ["BjorckLinear"]

from functools import partial
from typing import ClassVar

from torch import Tensor

from orthoconv.linalg import bjorck, bjorck_linear
from orthoconv.nn.arguments import Pair, positive_int
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method


class BjorckLinear(BaseLinear):
    """Orthogonal linear layer: the orthogonal matrix nearest to `weight`, by Bjorck's iteration.

    Arguments are those of `BaseLinear`, and

        iterations: Steps of the iteration.

    Shape:
        (..., in_features), to (..., out_features).

    >>> BjorckLinear(512, 10)
    BjorckLinear(in_features=512, out_features=10, bias=True)
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def set_up(self, *, iterations: int = 20) -> None:
        self.iterations = positive_int("iterations", iterations)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return bjorck(sources[0], self.iterations)

    def apply_matrix(self, x: Tensor) -> Tensor:
        return self.apply_unformed(x, partial(bjorck_linear, iterations=self.iterations), BjorckLinear)


register_method("bjorck", linear=BjorckLinear)
