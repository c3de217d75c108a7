"""The "large" network of Wong and Kolter (2018), as Li et al. (2019) and the paper use it (Section 5.1)."""

__all__ = ["DEPTH", "kwlarge"]

from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.nn import MaxMin

DEPTH = 7  # layers on the way from image to logits
DIVISOR = 4  # of the sides of an image


def kwlarge(
    make: LayerFactory, size: tuple[int, int], channels: int, classes: int, width: float, k: int, strided_k: int
) -> list[nn.Module]:
    """Four convolutions, two of them with stride 2, and three linear layers, with MaxMin between them."""
    a, b, c = (width_of(n, width) for n in (32, 64, 512))
    features = b * (size[0] // 4) * (size[1] // 4)
    return [
        *make.conv(channels, a, k), MaxMin(),
        *make.conv(a, a, strided_k, stride=2), MaxMin(),
        *make.conv(a, b, k), MaxMin(),
        *make.conv(b, b, strided_k, stride=2), MaxMin(),
        nn.Flatten(),
        *make.linear(features, c), MaxMin(),
        *make.linear(c, 512), MaxMin(),
        *make.head(512, classes),
    ]  # fmt: skip
