"""Skew orthogonal convolutions (SOC): the exponential of a skew convolution, and of a skew matrix.

Singla and Feizi, Skew Orthogonal Convolutions, ICML 2021.
"""

__all__ = ["ExpLinear", "SOCConv2d"]

from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import Pair
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method
from orthoconv.nn.spectral import UnscaledConv2d


class SOCConv2d(UnscaledConv2d):
    r"""Orthogonal convolution: the exponential of a skew convolution.

    .. math:: \exp\big(\tfrac12 (W - W^*)\big)

    at each frequency, exactly and not by the first terms of its series, so that no weight is too large. With c the
    larger number of channels, after downsampling and in each group, the layer has the first rows and columns of the
    exponential. Those are some of its columns, so an isometry, if the layer has no more inputs than outputs; some of
    its rows otherwise.

    Arguments are those of `BaseConv2d`, and

        identity: Whether the weight starts as zero and the exponential as the identity; otherwise it is random.

    Attributes: `weight`, the kernel of W, (groups c, c, kh, kw); `bias`.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> import torch
    >>> from orthoconv.testing import orthogonality_error
    >>> orthogonality_error(SOCConv2d(4, 8, 3, dtype=torch.float64), (4, 5, 6)) < 1e-12
    True
    """

    def set_up(self, *, identity: bool = False) -> None:
        o, i, kh, kw = self.kernel_shape
        c = max(o // self.groups, i)
        self.identity = bool(identity)
        self.weight = self.new_parameter(self.groups * c, c, kh, kw)

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does for a convolution, or as zero."""
        super().reset_parameters()
        if self.identity:
            nn.init.zeros_(self.weight)

    @staticmethod
    def orthogonalize(W: Tensor) -> Tensor:
        return _skew_exponential(W)

    def matrices(self, kernel: Tensor, size: Pair) -> Tensor:
        o, i = self.kernel_shape[0] // self.groups, self.kernel_shape[1]
        return super().matrices(kernel, size)[..., :o, :i]


class ExpLinear(BaseLinear):
    """Orthogonal linear layer: the first rows and columns of the exponential of (W - W*) / 2.

    The exponential has the order of the larger of the features, which makes the layer slow for thousands of them.

    Arguments are those of `nn.Linear`.

    Attributes: `weight`, W, of shape (c, c) with c the larger of the features; `bias`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> import torch
    >>> ExpLinear(32, 10)(torch.randn(2, 32)).shape
    torch.Size([2, 10])
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"

    def set_up(self) -> None:
        c = max(self.in_features, self.out_features)
        self.weight = nn.Parameter(self.weight.new_empty(c, c))

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return _skew_exponential(sources[0])[: self.out_features, : self.in_features]


def _skew_exponential(W: Tensor) -> Tensor:
    """Exponential of (W - W*) / 2, for square W (..., c, c).

    Its rounding errors grow with the norm of W; two steps of Bjorck's iteration make it orthogonal to the last digits.
    """
    X: Tensor = torch.linalg.matrix_exp(0.5 * (W - W.mH))
    for _ in range(2):
        X = 1.5 * X - 0.5 * (X @ (X.mH @ X))
    return X


register_method("soc", conv=SOCConv2d, linear="cayley")
register_method("exp", linear=ExpLinear)
