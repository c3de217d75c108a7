"""Linear layers by the QR factorisation."""

__all__ = ["QRLinear"]

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


register_method("qr", linear=QRLinear)
