"""WideResNet10-10 (Zagoruyko and Komodakis, 2016) in the paper's 1-Lipschitz form (Section 5.1)."""

__all__ = ["wide_resnet10_10"]

from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.nn import ConvexResidual, MaxMin, ScaledAvgPool2d


def wide_resnet10_10(
    make: LayerFactory, size: tuple[int, int], channels: int, classes: int, width: float, k: int
) -> list[nn.Module]:
    """One convolution, three residual blocks whose other branch is a convolution too, and two linear layers."""
    widths = [width_of(n, width) for n in (16, 160, 320, 640)]
    last = widths[-1]
    features = last * (size[0] // 16) * (size[1] // 16)

    def block(i: int, o: int, pool: int) -> list[nn.Module]:
        pooling = [ScaledAvgPool2d(pool)] if pool > 1 else []
        f = nn.Sequential(*make.conv(i, o, k), *pooling, MaxMin(), *make.conv(o, o, k))
        skip = nn.Sequential(*make.conv(i, o, k), *pooling, *make.scale())
        return [MaxMin(), ConvexResidual(f, skip)]

    return [
        *make.conv(channels, widths[0], k),
        *block(widths[0], widths[1], 1),
        *block(widths[1], widths[2], 2),
        *block(widths[2], widths[3], 2),
        MaxMin(), ScaledAvgPool2d(4), nn.Flatten(),
        *make.linear(features, last), MaxMin(),
        *make.head(last, classes),
    ]  # fmt: skip
