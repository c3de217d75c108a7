"""The critic of the Wasserstein experiment (Appendix D.2, after Li et al., 2019)."""

__all__ = ["DEPTH", "critic"]

from itertools import pairwise

from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.nn import MaxMin

DEPTH = 5
DIVISOR = 16


def critic(
    make: LayerFactory, size: tuple[int, int], channels: int, classes: int, width: float, k: int
) -> list[nn.Module]:
    """Four convolutions with stride 2 and MaxMin after each, and a linear layer."""
    sizes = [channels, *(width_of(n, width) for n in (64, 128, 256, 512))]
    convolutions: list[nn.Module] = []
    for i, o in pairwise(sizes):
        convolutions += [*make.conv(i, o, k, stride=2), MaxMin()]
    features = sizes[-1] * (size[0] // DIVISOR) * (size[1] // DIVISOR)
    return [*convolutions, nn.Flatten(), *make.head(features, classes)]
