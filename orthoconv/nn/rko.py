"""Reshaped kernel orthogonalisation (RKO).

Li et al., Preventing Gradient Attenuation in Lipschitz Constrained Convolutional Networks, NeurIPS 2019; after
Cisse et al., Parseval Networks, 2017. With the Cayley transform it is the paper's CRKO (Section 5).
"""

__all__ = ["RKOConv2d"]

import math
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from orthoconv.linalg import orthogonalizer as find_orthogonalizer
from orthoconv.nn.arguments import Pair
from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.methods import register_method


class RKOConv2d(WeightConv2d):
    """Convolution by an orthogonal (o, i kh kw) matrix, reshaped and divided by sqrt(kh kw): never expansive.

    Each pixel stands in kh kw patches, so the convolution is the product of a map of norm sqrt(kh kw) and the matrix.
    Its singular values are at most 1, most of them less: it is orthogonal only for one tap.

    Arguments are those of `BaseConv2d`, and

        orthogonalizer: "bjorck" (RKO) or "cayley" (CRKO).

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> RKOConv2d(3, 8, 3).singular_values((8, 8)).max().item() <= 1 + 1e-6
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def set_up(self, *, orthogonalizer: str = "bjorck") -> None:
        find_orthogonalizer(orthogonalizer)
        self.orthogonalizer = orthogonalizer
        super().set_up()

    def reset_parameters(self) -> None:
        """Orthogonal, as in the BCOP paper; for "cayley" the uniform one that its scale asks for."""
        super().reset_parameters()
        if self.orthogonalizer == "bjorck":
            nn.init.orthogonal_(self.weight)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        weight = sources[0]
        W = weight.flatten(1).unflatten(0, (self.groups, -1))  # (g, o, i kh kw)
        Q = find_orthogonalizer(self.orthogonalizer)(W) / math.sqrt(math.prod(weight.shape[2:]))
        return Q.reshape(weight.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, orthogonalizer={self.orthogonalizer!r}"


register_method("rko", conv=RKOConv2d, linear="bjorck")
register_method("crko", conv=partial(RKOConv2d, orthogonalizer="cayley"), linear="cayley")
