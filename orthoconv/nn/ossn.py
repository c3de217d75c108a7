"""One-sided spectral normalisation (OSSN).

Gouk et al., Regularisation of Neural Networks by Enforcing Lipschitz Continuity, 2018; after Miyato et al., 2018.
"""

__all__ = ["OSSNConv2d"]

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from orthoconv.nn.arguments import Pair, positive_int
from orthoconv.nn.kernel import WeightConv2d, same_conv2d
from orthoconv.nn.methods import register_method


class OSSNConv2d(WeightConv2d):
    """Convolution divided by an estimate of its norm, where that is more than 1.

    The estimate comes from the power method on the convolution and its adjoint, for the image at hand, each time from
    the same start: the layer has no state beyond its parameters. A power iterate is a lower bound of the norm, so the
    layer may exceed 1 slightly; what it really is, `singular_values` and `lipschitz_bound` say. Gradients pass through
    the estimate, with the singular vectors held fixed: exact at convergence, but second derivatives are not.

    Arguments are those of `BaseConv2d`, and

        iterations: Steps of the power method.
        identity: Whether the weight starts as the identity kernel; otherwise as that of nn.Conv2d.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> layer = OSSNConv2d(3, 8, 3)
    >>> layer.weight.data.mul_(10).shape
    torch.Size([8, 3, 3, 3])
    >>> layer.singular_values((8, 8)).max().item() < 1.1
    True
    """

    depends_on_size: ClassVar[bool] = True

    def set_up(self, *, iterations: int = 20, identity: bool = False) -> None:
        self.iterations = positive_int("iterations", iterations)
        super().set_up(identity=identity)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        weight = sources[0]
        return weight / self._norm(weight, size).clamp_min(1.0)

    def _norm(self, weight: Tensor, size: Pair) -> Tensor:
        """Estimate of the norm of the convolution on images of that size, differentiable in `weight`."""
        convolve = partial(same_conv2d, dilation=self.dilation, groups=self.groups)
        with torch.no_grad():
            fixed = weight.detach()  # to forward-mode derivatives, too
            u = _start((1, weight.shape[1] * self.groups, *size), weight)
            for _ in range(self.iterations):
                v = _normalized(convolve(u, fixed))
                u = _normalized(convolve(v, fixed, adjoint=True))
            v = _normalized(convolve(u, fixed))
        return (v * convolve(u, weight)).sum()


def _start(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A fixed vector with energy at every frequency: a chirp."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (n * n * 0.6180339887498949).cos().view(shape).to(like)


def _normalized(x: Tensor) -> Tensor:
    return torch.div(x, torch.linalg.vector_norm(x).clamp_min(1e-30))


register_method("ossn", conv=OSSNConv2d, linear="bjorck")
