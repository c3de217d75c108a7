"""Convex potential layers (CPL).

Meunier, Delattre, Araujo and Allauzen, A Dynamical System Perspective for Lipschitz Neural Networks, ICML 2022. The
bound of the norm is that of Delattre et al., Efficient Bound of Lipschitz Constant for Convolutional Layers by Gram
Iteration, ICML 2023.
"""

__all__ = ["CPLConv2d", "CPLLinear"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv import fourier
from orthoconv.nn.arguments import Pair
from orthoconv.nn.gram import norm_bounds
from orthoconv.nn.methods import register_method
from orthoconv.nn.potential import PotentialConv2d
from orthoconv.nn.potential_linear import PotentialLinear

_LEAST = 1e-3  # of the norm, relative to the largest weight: taps that meet on a small image may cancel


class CPLConv2d(PotentialConv2d):
    r"""Residual block with a convolution and its adjoint, 1-Lipschitz for any weight.

    .. math:: x - U^* \max(U x + b, 0), \qquad U = \sqrt 2 \, W / |W|

    In the letters of the paper, x - 2 / |W|^2 W* max(W x + |W| b / sqrt 2, 0). The layer divides by an upper bound of
    the norm |W| on images of the size at hand (`gram.norm_bounds`), so the guarantee holds for every weight. The paper
    divides by power iterates, which are lower bounds. With n rows or columns, whichever are fewer, the bound is too
    large by a factor of at most n^(1 / (2^(squarings + 1) + 2)).

    The block maps channels to themselves: inputs get channels of zeros, or the first channels of the result are
    returned; see `PotentialConv2d`. There is no inverse and no transposed layer.

    Arguments are those of `ImageLayer`, and

        hidden: Channels of U x, a multiple of groups. By default, each group has half the smaller number of its
            outputs and inputs, rounded up. With a stride, the inputs are those of a whole block of pixels.
        identity: Whether a learned gate multiplies the step, and starts almost closed: a square block then starts near
            the identity.
        squarings: How often the Gram matrices are squared.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> CPLConv2d(3, 8, 3).lipschitz((3, 8, 8))
    1.0
    """

    def set_up(self, *, hidden: int | None = None, identity: bool = False, squarings: int = 6) -> None:
        self.squarings = _check_squarings(squarings)
        super().set_up(hidden=hidden, identity=identity)

    def transform(self, size: Pair, *sources: Tensor) -> Tensor:
        return _normalized(sources[0], size, self.dilation, self.groups, self.squarings)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, squarings={self.squarings}"


class CPLLinear(PotentialLinear):
    """Residual block with a matrix and its transpose, 1-Lipschitz for any weight: see `CPLConv2d`. It is not linear.

    Arguments are those of `nn.Linear`, and

        hidden: Entries of U x; by default half the smaller of in_features and out_features, rounded up.
        identity: Whether a learned gate multiplies the step, and starts almost closed: a square block then starts near
            the identity.
        squarings: How often the Gram matrix is squared.

    Shape:
        (..., in_features), to (..., out_features).

    >>> CPLLinear(64, 10).lipschitz()
    1.0
    """

    def set_up(self, *, hidden: int | None = None, identity: bool = False, squarings: int = 6) -> None:
        self.squarings = _check_squarings(squarings)
        super().set_up(hidden=hidden, identity=identity)

    def transform(self, size: Pair, *sources: Tensor) -> Tensor:
        return _normalized(sources[0][..., None, None], size, (1, 1), 1, self.squarings)[..., 0, 0]


def _normalized(W: Tensor, size: Sequence[int], dilation: Pair, groups: int, squarings: int) -> Tensor:
    """sqrt 2 W / |W| for the kernel (o, i, kh, kw) of each group; zero where W is."""
    parts = W.unflatten(0, (groups, -1))  # (g, o, i, kh, kw)
    largest = torch.linalg.vector_norm(parts.detach(), math.inf, (1, 2, 3, 4), keepdim=True)
    W = (parts / largest.where(largest > 0, 1)).flatten(0, 1)  # U is the same for any multiple of W
    bounds = norm_bounds(fourier.spectrum(W, size, dilation=dilation, groups=groups), squarings)
    factors = math.sqrt(2) / bounds.clamp_min(_LEAST)
    return W * factors.repeat_interleave(len(W) // groups)[:, None, None, None]


def _check_squarings(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 10:
        raise ValueError(f"squarings must be an int from 0 to 10, got {value!r}")
    return value


register_method("cpl", conv=CPLConv2d, linear=CPLLinear)
