"""Reshaped kernel orthogonalisation (RKO).

Li et al., Preventing Gradient Attenuation in Lipschitz Constrained Convolutional Networks, NeurIPS 2019; after
Cisse et al., Parseval Networks, 2017. With the Cayley transform it is the paper's CRKO (Section 5).
"""

__all__ = ["RKOConv2d", "RKOConvTranspose2d"]

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.linalg import cayley_preimage, polar
from orthoconv.linalg import orthogonalizer as find_orthogonalizer
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.methods import register_method

_DAMPING = 1e-2  # of preimages: an eigenvalue -1, which a square matrix may have, has none


class RKOConv2d(WeightConv2d):
    """Convolution by an orthogonal (o, i kh kw) matrix, reshaped and divided by sqrt(kh kw): never expansive.

    Each pixel stands in kh kw patches, so the convolution is the product of a map of norm sqrt(kh kw) and the matrix.
    Its singular values are at most 1, most of them less: it is orthogonal only for one tap.

    Arguments are those of `BaseConv2d`, and

        orthogonalizer: "bjorck" (RKO) or "cayley" (CRKO).
        identity: Whether the layer starts as the identity divided by sqrt(kh kw); outputs beyond the inputs are random.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> RKOConv2d(3, 8, 3).singular_values((8, 8)).max().item() <= 1 + 1e-6
    True
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def set_up(self, *, orthogonalizer: str = "bjorck", identity: bool = False) -> None:
        find_orthogonalizer(orthogonalizer)
        self.orthogonalizer = orthogonalizer
        super().set_up(identity=identity)

    def reset_parameters(self) -> None:
        """Orthogonal, as in the BCOP paper; for "cayley" the uniform one that its scale asks for; or the identity."""
        super().reset_parameters()
        if self.identity:
            self._start_as_identity()
        elif self.orthogonalizer == "bjorck":
            nn.init.orthogonal_(self.weight)

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        W = self.weight.flatten(2)  # a weight of full rank: outputs without input get other taps than the centre
        extra = torch.randn_like(W) * (W.sum((0, 1)) == 0)
        W = torch.where(W.sum((1, 2), keepdim=True) == 0, extra, W).flatten(1).unflatten(0, (self.groups, -1))
        W = cayley_preimage(polar(W)) if self.orthogonalizer == "cayley" else polar(W)
        self.weight.copy_(W.reshape(self.weight.shape))

    @torch.no_grad()
    def start_from(self, kernel: Tensor) -> None:
        W = kernel.flatten(1).unflatten(0, (self.groups, -1))  # (g, o, i kh kw)
        W = cayley_preimage(polar(W), _DAMPING) if self.orthogonalizer == "cayley" else W
        self.weight.copy_(W.reshape(self.weight.shape))

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        weight = sources[0]
        W = weight.flatten(1).unflatten(0, (self.groups, -1))  # (g, o, i kh kw)
        Q = find_orthogonalizer(self.orthogonalizer)(W) / math.sqrt(math.prod(weight.shape[2:]))
        return Q.reshape(weight.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, orthogonalizer={self.orthogonalizer!r}"


class RKOConvTranspose2d(TransposedConv2d, RKOConv2d):
    """Adjoint of the `RKOConv2d` of the same weight from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `orthogonalizer` and `identity` as in `RKOConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> RKOConvTranspose2d(8, 2, 4, stride=2).singular_values((4, 4)).max().item() <= 1 + 1e-6
    True
    """


register_method("rko", conv=RKOConv2d, linear="bjorck", transposed=RKOConvTranspose2d)
register_method(
    "crko",
    conv=partial(RKOConv2d, orthogonalizer="cayley"),
    linear="cayley",
    transposed=partial(RKOConvTranspose2d, orthogonalizer="cayley"),
)
