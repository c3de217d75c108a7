"""Linear layers by the QR factorisation, and by the Frobenius norm."""

__all__ = ["FrobeniusLinear", "QRLinear"]

from typing import ClassVar

import torch
from torch import Tensor

from orthoconv.nn.arguments import Pair
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method


class QRLinear(BaseLinear):
    """Orthogonal linear layer: the factor Q of ``weight = Q R``, where R has a positive diagonal.

    Its columns are those of the weight after Gram and Schmidt, by Householder's reflections, orthogonal to the last
    digits for any weight. A wide weight is transposed. Where the weight has lower rank, the layer is orthogonal, too,
    but has no derivative.

    Arguments are those of `BaseLinear`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(QRLinear(20, 10, dtype=torch.float64), (20,)) < 1e-12
    True
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        (W,) = sources
        wide = W.shape[0] < W.shape[1]
        Q, R = torch.linalg.qr(W.mT if wide else W)
        positive: Tensor = Q * torch.where(R.detach().diagonal() < 0, -1, 1).to(Q)
        return positive.mT if wide else positive


class FrobeniusLinear(BaseLinear):
    """Linear layer whose matrix is `weight` divided by its Frobenius norm: never expansive; zero stays zero.

    It is orthogonal for one output, as in the critics of Anil, Lucas and Grosse, Sorting out Lipschitz functions, 2019.
    For more of them its norm is below 1, for n equal singular values by the square root of n.

    Arguments are those of `BaseLinear`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> round(FrobeniusLinear(20, 1).lipschitz(), 5)
    1.0
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        (W,) = sources
        largest = W.detach().abs().amax()
        V = W / largest.where(largest > 0, 1)  # the squares of small entries would be 0
        norm: Tensor = torch.linalg.vector_norm(V)
        return V / norm.where(norm > 0, 1)


register_method("qr", linear=QRLinear)
register_method("frobenius", linear=FrobeniusLinear)
