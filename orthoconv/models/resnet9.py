"""ResNet9 (after He et al., 2016) in the paper's 1-Lipschitz form (Section 5.1)."""

__all__ = ["resnet9"]

from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.nn import ConvexResidual, MaxMin, ScaledAvgPool2d


def resnet9(
    make: LayerFactory, size: tuple[int, int], channels: int, classes: int, width: float, k: int
) -> list[nn.Module]:
    """Four convolutions and two residual blocks with poolings between them, then two linear layers."""
    a, b, c, d = (width_of(n, width) for n in (64, 128, 256, 512))
    features = d * (size[0] // 16) * (size[1] // 16)

    def residual(n: int) -> ConvexResidual:
        f = nn.Sequential(*make.conv(n, n, k), MaxMin(), *make.conv(n, n, k), MaxMin())
        return ConvexResidual(f, nn.Sequential(*make.scale(2)))

    return [
        *make.conv(channels, a, k), MaxMin(),
        *make.conv(a, b, k), MaxMin(), ScaledAvgPool2d(2),
        residual(b),
        *make.conv(b, c, k), MaxMin(), ScaledAvgPool2d(2),
        *make.conv(c, d, k), MaxMin(), ScaledAvgPool2d(2),
        residual(d),
        ScaledAvgPool2d(2), nn.Flatten(),
        *make.linear(features, d), MaxMin(),
        *make.head(d, classes),
    ]  # fmt: skip
