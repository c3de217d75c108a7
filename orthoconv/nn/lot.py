"""Layer-wise orthogonal training (LOT): the polar factor of a convolution, and of a matrix.

Xu, Li and Li, LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness, NeurIPS 2022.
"""

__all__ = ["LOTConv2d", "PolarLinear"]

from typing import ClassVar

from torch import Tensor

from orthoconv.linalg import polar
from orthoconv.nn.arguments import Pair
from orthoconv.nn.kernel import identity_
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.spectral import UnscaledConv2d


class LOTConv2d(UnscaledConv2d):
    r"""Orthogonal convolution: the one nearest to the convolution by `weight`, its polar factor.

    .. math:: V (V^* V)^{-1/2}

    at each frequency, by a scaled Newton-Schulz iteration that runs until it has converged (`linalg.polar`). The scale
    of the weight does not matter.

    It is orthogonal for all weights but those whose matrix at some frequency has lower rank and is not zero; there no
    orthogonal convolution is nearest, singular values of 0 stay 0, and the layer is still nonexpansive. Near such
    weights the iteration takes more rounds, and derivatives are large. Transformed or traced by torch, it is orthogonal
    up to condition numbers of 1e8.

    Arguments are those of `BaseConv2d`, and

        identity: Whether the weight starts as the identity kernel, as in the paper; otherwise as that of nn.Conv2d.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(LOTConv2d(4, 4, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    orthogonalize = staticmethod(polar)

    def set_up(self, *, identity: bool = False) -> None:
        self.identity = bool(identity)
        super().set_up()

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does for a convolution, or as the identity."""
        super().reset_parameters()
        if self.identity:
            identity_(self.weight, self.groups)


class PolarLinear(BaseLinear):
    """Orthogonal linear layer: the polar factor of `weight`, the orthogonal matrix nearest to it.

    It differs from `BjorckLinear` in its accuracy: the iteration runs until it has converged, see `linalg.polar`.

    Arguments are those of `nn.Linear`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(PolarLinear(20, 10, dtype=torch.float64), (20,)) < 1e-12
    True
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return polar(sources[0])


register_method("lot", conv=LOTConv2d, linear="polar")
register_method("polar", linear=PolarLinear)
