"""Layer-wise orthogonal training (LOT): the polar factor of a convolution, and of a matrix.

Xu, Li and Li, LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness, NeurIPS 2022.
"""

__all__ = ["LOTConv1d", "LOTConv2d", "LOTConv3d", "LOTConvTranspose2d", "PolarLinear"]

from typing import ClassVar

import torch
from torch import Tensor

from orthoconv.linalg import polar, polar_linear, without_noise
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.sequences import SequenceConv1d
from orthoconv.nn.spectral import UnscaledConv2d
from orthoconv.nn.volumes import VolumeConv3d


class LOTConv2d(UnscaledConv2d):
    r"""Orthogonal convolution: the one nearest to the convolution by `weight`, its polar factor.

    .. math:: V (V^* V)^{-1/2}

    at each frequency, where V is the matrix of `weight`. `linalg.polar` repeats a scaled Newton-Schulz step until it
    has converged. On a CPU, it takes eigenvalues for large matrices in float32. The scale of the weight does not
    matter.

    It is orthogonal for all weights but those whose matrix at some frequency has lower rank and is not zero. There the
    nearest orthogonal convolution is not unique: singular values of 0 stay 0, and the layer is nonexpansive. Near such
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

    @staticmethod
    def orthogonalize(W: Tensor) -> Tensor:
        return polar(without_noise(W))

    def set_up(self, *, identity: bool = False) -> None:
        self.identity = bool(identity)
        super().set_up()

    @torch.no_grad()
    def start_from(self, kernel: Tensor) -> None:
        self.weight.copy_(kernel)


class LOTConvTranspose2d(TransposedConv2d, LOTConv2d):
    """Adjoint of the `LOTConv2d` of the same weight from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `identity` as in `LOTConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> LOTConvTranspose2d(12, 3, 3, stride=2)(torch.randn(1, 12, 4, 4)).shape
    torch.Size([1, 3, 8, 8])
    """


class LOTConv1d(SequenceConv1d, LOTConv2d):
    """`LOTConv2d` for sequences, in place of `nn.Conv1d`.

    Arguments are those of `SequenceConv1d`, and `identity` as in `LOTConv2d`.

    Shape:
        (b, in_channels, n) or (in_channels, n), to (b, out_channels, n / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(LOTConv1d(3, 8, 5, dtype=torch.float64), (3, 16)) < 1e-12
    True
    """


class LOTConv3d(VolumeConv3d, LOTConv2d):
    """`LOTConv2d` for volumes, in place of `nn.Conv3d`.

    Arguments are those of `VolumeConv3d`, and `identity` as in `LOTConv2d`.

    Shape:
        (b, in_channels, d, h, w) or (in_channels, d, h, w), to (b, out_channels, d / stride, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(LOTConv3d(2, 3, 3, dtype=torch.float64), (2, 4, 3, 2)) < 1e-12
    True
    """


class PolarLinear(BaseLinear):
    """Orthogonal linear layer: the polar factor of `weight`, the orthogonal matrix nearest to it.

    It is more accurate than `BjorckLinear`, which stops after a fixed number of iterations: see `linalg.polar`.

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

    def apply_matrix(self, x: Tensor) -> Tensor:
        return self.apply_unformed(x, polar_linear, PolarLinear)


register_method(
    "lot", conv=LOTConv2d, linear="polar", transposed=LOTConvTranspose2d, conv1d=LOTConv1d, conv3d=LOTConv3d
)
register_method("polar", linear=PolarLinear)
