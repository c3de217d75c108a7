"""Linear layers whose rows have norm 1 (Singla, Singla and Feizi, Improved deterministic l2 robustness, 2022)."""

__all__ = ["NormalizedLinear"]

import torch
from torch import Tensor

from orthoconv.nn.arguments import Pair
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.methods import register_method


class NormalizedLinear(BaseLinear):
    """Linear layer whose matrix has rows of norm 1, the rows of `weight` divided by their norms; zero rows stay zero.

    It is meant as the last layer of a classifier. Each logit is 1-Lipschitz, but the layer as a whole is not: its norm
    may be as large as the square root of `out_features`. It promises nothing by itself; `orthoconv.certify` uses the
    distances of its rows.

    Arguments:
        in_features: Entries of an input.
        out_features: Entries of an output.
        bias: Whether to add a learnable bias.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (..., in_features), to (..., out_features).

    >>> layer = NormalizedLinear(2, 3, bias=False)
    >>> torch.allclose(layer(torch.eye(2)).square().sum(0), torch.ones(3))
    True
    """

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        (W,) = sources
        largest = W.detach().abs().amax(1, keepdim=True)  # the squares of small rows would be 0 in float32
        V = W / largest.where(largest > 0, 1)
        norms: Tensor = torch.linalg.vector_norm(V, dim=1, keepdim=True)
        return V / norms.where(norms > 0, 1)


register_method("normalized", linear=NormalizedLinear)
