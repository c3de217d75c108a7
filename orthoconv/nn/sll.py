"""SDP-based Lipschitz layers (SLL).

Araujo, Havens, Delattre, Allauzen and Hu, A Unified Algebraic Perspective on Lipschitz Neural Networks, ICLR 2023.
"""

__all__ = ["SLLConv2d", "SLLLinear"]

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import Pair
from orthoconv.nn.gram import gram_kernel
from orthoconv.nn.methods import register_method
from orthoconv.nn.potential import Potential, PotentialConv2d
from orthoconv.nn.potential_linear import PotentialLinear


class _Weighted(Potential):
    """Block with a positive number q for each row of W, kept as its logarithm; abstract."""

    log_q: nn.Parameter

    def set_up(self, *, hidden: int | None = None, identity: bool = False) -> None:
        super().set_up(hidden=hidden, identity=identity)
        self.log_q = self.new_parameter(self.hidden)

    def reset_parameters(self) -> None:
        """Initialise the weight as Xavier does, and q as 1."""
        super().reset_parameters()
        nn.init.zeros_(self.log_q)

    def sources(self) -> tuple[Tensor, ...]:
        weight, *gate = super().sources()
        return weight, self.log_q, *gate


class SLLConv2d(_Weighted, PotentialConv2d):
    r"""Residual block with a convolution and its adjoint, 1-Lipschitz for any weight.

    .. math:: x - U^* \max(U x + b, 0), \qquad U = \sqrt{2 T} \, W, \qquad
        T_i = \Big(\sum_j |W W^*|_{ij} q_j / q_i\Big)^{-1}

    In the letters of the paper, x - 2 W* T max(W x + b / sqrt(2 T), 0). Each row of W has a positive number q, which is
    learned; the parameter `log_q` is its logarithm. The matrix T^-1 - W W* is diagonally dominant once it is scaled by
    q, so it has no negative eigenvalue. The sums run over all offsets of the correlation of the kernel with itself, so
    that the bound holds for every image size, dilation and padding. Nothing is added to the sums: a row of zeros stays
    zero.

    The block maps channels to themselves: inputs get channels of zeros, or the first channels of the result are
    returned; see `PotentialConv2d`. There is no inverse and no transposed layer.

    Arguments are those of `ImageLayer`, and

        hidden: Channels of U x, a multiple of groups. By default, each group has half the smaller number of its
            outputs and inputs, rounded up. With a stride, the inputs are those of a whole block of pixels.
        identity: Whether a learned gate multiplies the step, and starts almost closed: a square block then starts near
            the identity.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> SLLConv2d(3, 8, 3).lipschitz((3, 8, 8))
    1.0
    """

    depends_on_size = False

    def transform(self, size: Pair, *sources: Tensor) -> Tensor:
        W, log_q = (source.chunk(self.groups) for source in sources)
        return torch.cat([_rescaled(*part) for part in zip(W, log_q, strict=True)])


class SLLLinear(_Weighted, PotentialLinear):
    """Residual block with a matrix and its transpose, 1-Lipschitz for any weight: see `SLLConv2d`. It is not linear.

    Arguments are those of `nn.Linear`, and

        hidden: Entries of U x; by default half the smaller of in_features and out_features, rounded up.
        identity: Whether a learned gate multiplies the step, and starts almost closed: a square block then starts near
            the identity.

    Shape:
        (..., in_features), to (..., out_features).

    >>> SLLLinear(64, 10).lipschitz()
    1.0
    """

    def transform(self, size: Pair, *sources: Tensor) -> Tensor:
        return _rescaled(sources[0][..., None, None], sources[1])[..., 0, 0]


def _rescaled(weight: Tensor, log_q: Tensor) -> Tensor:
    """sqrt(2 T) W for a kernel W (o, i, kh, kw)."""
    largest = weight.detach().abs().amax()
    W = weight / largest.where(largest > 0, 1)  # U is the same for any multiple of W
    q = torch.exp(log_q - log_q.detach().amax())  # and for any multiple of q
    sums = gram_kernel(W.transpose(0, 1)).abs().sum((2, 3)) @ q  # (o)
    used = sums > torch.finfo(sums.dtype).tiny
    T = torch.where(used, q / sums.where(used, 1), 0)
    return W * _root(2 * T)[:, None, None, None]


def _root(T: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0."""
    return torch.where(T > 0, T.where(T > 0, 1).sqrt(), 0)


register_method("sll", conv=SLLConv2d, linear=SLLLinear)
