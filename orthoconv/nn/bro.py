"""Block reflector orthogonal layers (BRO).

Lai, Huang, Chao and Chen, Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing
Loss, ICML 2025.
"""

__all__ = ["BROConv1d", "BROConv2d", "BROConv3d", "BROConvTranspose2d", "BROLinear"]

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.convolutions import convolve, convolve_by
from orthoconv.elimination import inverse
from orthoconv.linalg import gram_factor, orthonormal, reflect, resized, without_noise
from orthoconv.nn.arguments import Pair, positive_int
from orthoconv.nn.convolution import TransposedConv2d
from orthoconv.nn.kernel import add_channels, same_conv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.sequences import SequenceConv1d
from orthoconv.nn.spectral import UnscaledConv2d, Way
from orthoconv.nn.volumes import VolumeConv3d
from orthoconv.planes import plane
from orthoconv.tracing import is_eager


class BROConv2d(UnscaledConv2d):
    r"""Orthogonal convolution: at each frequency the reflection at the orthogonal complement of `rank` vectors.

    .. math:: Q = I - 2 V (V^* V)^{-1} V^* = I - 2 X X^*, \qquad V \in C^{c \times r}.

    Q is Hermitian, and orthogonal; where V has lower rank, it reflects fewer vectors. With c the larger number of
    channels, after downsampling and in each group, the layer has as many of the first rows of Q as it has outputs, and
    as many of the first columns as it has inputs. With no more inputs than outputs, these are whole columns of Q, and
    the layer is an isometry. With more inputs, these are whole rows of Q, and the layer never increases norms. With
    ``rank = c``, Q is -I, whatever the weight. X is `linalg.orthonormal` of V. Q is formed only where that takes fewer
    products than to multiply by X* and X. If the condition number of V is above 1e7, singular values may be below 1,
    never above it.

    Arguments are those of `BaseConv2d`, and

        rank: Number r of the vectors, from 1 to c. None for c // 4 or the smaller number of channels, if that is less;
            but at least 1.
        identity: Whether the vectors start as the first r unit vectors: the layer changes the sign of the first r
            channels, and keeps the others. Otherwise they are random.

    Attributes: `weight`, the kernel of V, (groups c, rank, kh, kw); `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(BROConv2d(4, 8, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    @staticmethod
    def orthogonalize(W: Tensor) -> Tensor:
        """Orthonormal columns X (..., c, r) of V, the factor of the reflection."""
        return orthonormal(without_noise(W))

    def set_up(self, *, rank: int | None = None, identity: bool = False) -> None:
        o, i = self._channels
        self.rank, self.identity = _check_rank(rank, o, i), bool(identity)
        self.weight = self.new_parameter(self.groups * max(o, i), self.rank, *self.kernel_shape[2:])

    @property
    def _channels(self) -> Pair:
        """Outputs and inputs of a group."""
        return self.kernel_shape[0] // self.groups, self.kernel_shape[1]

    def formed(self, operator: Tensor) -> Tensor:
        return _reflector(operator, *self._channels)

    def possible_ways(self, size: Pair, *, adjoint: bool, images: int) -> list[Way]:
        lifts = not self.remembers and math.prod(size) > budget.DENSE_PIXELS and budget.has_cache(self.weight.device)
        return ["lifted", "matrices"] if lifts else ["matrices", "lifted"]

    def convolve_by(self, way: Way, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        size, (o, i) = self.geometry.size_of(x.shape), self._channels[::-1] if adjoint else self._channels
        if way == "lifted":
            V = self.spectral_weight(self.weight, size)
            if gram_factor(V) is not None:
                return self._lift(x, V, o, i, bias)
        if way == "constant" or self.rank * (o + i) >= o * i:
            return super().convolve_by("constant" if way == "constant" else "matrices", x, bias, adjoint=adjoint)

        def multiply(S: Tensor, X: Tensor) -> Tensor:  # (f g, b, i), (f g, c, r)
            return torch.baddbmm(resized(S, o), S @ X[:, :i].conj(), X[:, :o].mT, alpha=-2)

        return convolve_by(plane(size, x.dtype, x.device), x, self.cached_operator(size), multiply, o, bias)

    def _lift(self, x: Tensor, V: Tensor, o: int, i: int, bias: Tensor | None) -> Tensor:
        """x - 2 V M V* x with M = (V* V)^-1, V (f, g, c, r): V in space, M by frequency, V* where it is cheaper."""
        self.check()
        kernels = self.weight.unflatten(0, (self.groups, -1))  # (g, c, r, kh, kw)
        first, last = (kernels[:, :n].flatten(0, 1) for n in (i, o))
        M, z = inverse(V.mH @ V), x  # (f, g, r, r)
        if i <= self.rank:
            M = M @ V[..., :i, :].mH  # (f, g, r, i)
        else:
            z = same_conv2d(x, first, None, self.dilation, self.groups, adjoint=True)
        z = convolve(plane((x.shape[-2], x.shape[-1]), x.dtype, x.device), z, M)
        return add_channels(same_conv2d(z, -2 * last, bias, self.dilation, self.groups), x, self.groups)

    def inner_units(self, size: Pair) -> float:
        X = self.cached_operator(size)
        largest = 1 + 2 * float(torch.linalg.matrix_norm(X).max()) ** 2
        return self.spectral_units(size, 2 * largest)  # twice: sums over the channels, then over the rank

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


class BROConvTranspose2d(TransposedConv2d, BROConv2d):
    """Adjoint of the `BROConv2d` of the same weight from `out_channels` to `in_channels`.

    Arguments are those of `TransposedConv2d`, and `rank` and `identity` as in `BROConv2d`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h * stride, w * stride).

    >>> import torch
    >>> BROConvTranspose2d(12, 3, 3, stride=2)(torch.randn(1, 12, 4, 4)).shape
    torch.Size([1, 3, 8, 8])
    """


class BROConv1d(SequenceConv1d, BROConv2d):
    """`BROConv2d` for sequences, in place of `nn.Conv1d`.

    Arguments are those of `SequenceConv1d`, and `rank` and `identity` as in `BROConv2d`.

    Shape:
        (b, in_channels, n) or (in_channels, n), to (b, out_channels, n / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(BROConv1d(3, 8, 5, dtype=torch.float64), (3, 16)) < 1e-12
    True
    """


class BROConv3d(VolumeConv3d, BROConv2d):
    """`BROConv2d` for volumes, in place of `nn.Conv3d`.

    Arguments are those of `VolumeConv3d`, and `rank` and `identity` as in `BROConv2d`.

    Shape:
        (b, in_channels, d, h, w) or (in_channels, d, h, w), to (b, out_channels, d / stride, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(BROConv3d(2, 3, 3, dtype=torch.float64), (2, 4, 3, 2)) < 1e-12
    True
    """


class BROLinear(BaseLinear):
    """Orthogonal linear layer: the first rows and columns of a reflection of `rank` vectors, see `BROConv2d`.

    Arguments are those of `nn.Linear`, and

        rank: Number r of the vectors, from 1 to c, the larger of the features. None for c // 4 or the smaller of the
            features, if that is less; but at least 1.

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
        self.rank = _check_rank(rank, self.out_features, self.in_features)
        self.weight = nn.Parameter(self.weight.new_empty(c, self.rank))

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return _reflector(orthonormal(sources[0]), self.out_features, self.in_features)

    def apply_matrix(self, x: Tensor) -> Tensor:
        V = self.weight
        if self.remembers or not budget.has_cache(V.device) or not is_eager(x, V):
            return super().apply_matrix(x)
        self.check()
        if (L := gram_factor(V)) is None:
            return super().apply_matrix(x)
        y = reflect(x.reshape(-1, self.in_features), V, L, self.out_features).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def _reflector(X: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of I - 2 X X*, for X (..., c, r)."""
    eye = torch.eye(rows, columns, dtype=X.dtype, device=X.device)
    return eye - 2 * X[..., :rows, :] @ X[..., :columns, :].mH


def _check_rank(rank: int | None, o: int, i: int) -> int:
    c = max(o, i)
    if rank is None:
        return max(1, min(c // 4, o, i))
    if positive_int("rank", rank) > c:
        raise ValueError(f"rank must be at most {c}, the larger number of channels of a group, got {rank}")
    return rank


register_method(
    "bro", conv=BROConv2d, linear=BROLinear, transposed=BROConvTranspose2d, conv1d=BROConv1d, conv3d=BROConv3d
)
