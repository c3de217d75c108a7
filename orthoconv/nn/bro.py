"""Block reflector orthogonal layers (BRO).

Lai, Huang, Chao and Chen, Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing
Loss, ICML 2025.
"""

__all__ = ["BROConv2d", "BROLinear"]

from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.linalg import polar
from orthoconv.nn.arguments import Pair, positive_int
from orthoconv.nn.kernel import identity_
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.spectral import UnscaledConv2d


class BROConv2d(UnscaledConv2d):
    r"""Orthogonal convolution: at each frequency the reflection at the orthogonal complement of `rank` vectors.

    .. math:: Q = I - 2 V (V^* V)^{-1} V^*, \qquad V \in C^{c \times r}.

    Q is Hermitian, and orthogonal for all weights; where V has lower rank, it reflects fewer vectors. With c the larger
    number of channels, after downsampling and in each group, the layer has the first rows and columns of Q. Those are
    some of its columns, so an isometry, if the layer has no more inputs than outputs; some of its rows otherwise. With
    ``rank = c`` it is -I, whatever the weight. V (V* V)^-1 V* is X X* for the polar factor X of V, see `linalg.polar`.

    Arguments are those of `BaseConv2d`, and

        rank: Number r of the vectors, from 1 to c; None for c // 4, but at least 1.
        identity: Whether the vectors start as the first r unit vectors, so that the layer keeps the other channels;
            otherwise they are random.

    Attributes: `weight`, the kernel of V, (groups c, rank, kh, kw); `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(BROConv2d(4, 8, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    def set_up(self, *, rank: int | None = None, identity: bool = False) -> None:
        o, i, kh, kw = self.kernel_shape
        c = max(o // self.groups, i)
        self.rank, self.identity = _check_rank(rank, c), bool(identity)
        self.weight = self.new_parameter(self.groups * c, self.rank, kh, kw)

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does for a convolution, or as the identity."""
        super().reset_parameters()
        if self.identity:
            identity_(self.weight, self.groups)

    @staticmethod
    def orthogonalize(W: Tensor) -> Tensor:
        """Reflection (..., c, c) of the columns of W (..., c, r)."""
        return _reflector(W, W.shape[-2], W.shape[-2])

    def matrices(self, kernel: Tensor, size: Pair) -> Tensor:
        o, i = self.kernel_shape[0] // self.groups, self.kernel_shape[1]
        return super().matrices(kernel, size)[..., :o, :i]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


class BROLinear(BaseLinear):
    """Orthogonal linear layer: the first rows and columns of a reflection of `rank` vectors, see `BROConv2d`.

    Arguments are those of `nn.Linear`, and

        rank: Number r of the vectors, from 1 to c, the larger of the features; None for c // 4, but at least 1.

    Attributes: `weight`, the vectors, (c, rank); `bias`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> import torch
    >>> BROLinear(512, 10)(torch.randn(2, 512)).shape
    torch.Size([2, 10])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def set_up(self, *, rank: int | None = None) -> None:
        c = max(self.in_features, self.out_features)
        self.rank = _check_rank(rank, c)
        self.weight = nn.Parameter(self.weight.new_empty(c, self.rank))

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return _reflector(sources[0], self.out_features, self.in_features)


def _reflector(V: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of I - 2 V (V* V)^-1 V*, for V (..., c, r)."""
    X = polar(V)
    eye = torch.eye(rows, columns, dtype=V.dtype, device=V.device)
    return eye - 2 * X[..., :rows, :] @ X[..., :columns, :].mH


def _check_rank(rank: int | None, c: int) -> int:
    if rank is None:
        return max(1, c // 4)
    if positive_int("rank", rank) > c:
        raise ValueError(f"rank must be at most {c}, the larger number of channels of a group, got {rank}")
    return positive_int("rank", rank)


register_method("bro", conv=BROConv2d, linear=BROLinear)
