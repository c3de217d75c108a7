"""Rules for torch's modules that pool, resize and pad images."""

__all__: list[str] = []

import math

import torch
from torch import Tensor, nn

from orthoconv.certificates.rules import Shape, register_rule
from orthoconv.linalg import spectral_norm
from orthoconv.nn.arguments import ints, pair


def _pooling(module: nn.AvgPool2d | nn.MaxPool2d, shape: Shape) -> float:
    """Each window is bounded by the norm of its weights (1 for a maximum); a pixel stands in a number of windows."""
    (kh, kw), (sh, sw) = (pair("size", v) for v in (module.kernel_size, module.stride))
    dilated = isinstance(module, nn.MaxPool2d) and pair("dilation", module.dilation) != (1, 1)
    rows, columns = _number_of_windows(module, shape)
    windows = kh * kw if dilated else min(math.ceil(kh / sh), rows) * min(math.ceil(kw / sw), columns)
    weight = 1.0
    if isinstance(module, nn.AvgPool2d):
        weight = math.sqrt(kh * kw) / abs(module.divisor_override or kh * kw)
        if module.ceil_mode or (ints(module.padding) != (0, 0) and not module.count_include_pad):
            weight = max(1.0, weight)  # a window at the border may hold a single pixel
    return weight * math.sqrt(windows)


def _number_of_windows(module: nn.AvgPool2d | nn.MaxPool2d, shape: Shape) -> tuple[int, int]:
    """Windows along each axis, at most."""
    k, s, p = (ints(v) or (0, 0) for v in (module.kernel_size, module.stride, module.padding))
    d = (ints(module.dilation) if isinstance(module, nn.MaxPool2d) else None) or (1, 1)
    axes = zip(shape[-2:], k, s, p, d, strict=True)
    rows, columns = (max(1, math.ceil((n + 2 * p - d * (k - 1) - 1) / s) + 1) for n, k, s, p, d in axes)
    return rows, columns


def _adaptive_norm(module: nn.AdaptiveAvgPool2d, shape: Shape) -> float:
    """Norm of the map: the product of those along each axis, which are small matrices of means."""
    return math.prod(spectral_norm(_means(n, m)) for n, m in zip(shape[-2:], _made(module, shape), strict=True))


def _made(module: nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d, shape: Shape) -> list[int]:
    """Height and width that an adaptive pool makes."""
    output = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,) * 2
    return [n if m is None else m for n, m in zip(shape[-2:], output, strict=True)]


def _windows_along(n: int, m: int) -> list[range]:
    """Pixels of each of m adaptive windows along an axis of n pixels, as torch has them."""
    return [range(k * n // m, -(-(k + 1) * n // m)) for k in range(m)]


def _means(n: int, m: int) -> Tensor:
    """Matrix (m, n) of the means over adaptive windows along an axis."""
    rows = torch.zeros(m, n, dtype=torch.float64)
    for row, window in zip(rows, _windows_along(n, m), strict=True):
        row[window.start : window.stop] = 1 / len(window)
    return rows


def _adaptive_maximum(module: nn.AdaptiveMaxPool2d, shape: Shape) -> float:
    """A pixel stands in a number of windows, along each axis."""
    if module.return_indices:
        raise TypeError(f"AdaptiveMaxPool2d is bounded if it returns one tensor, got {module}")
    counts = [
        max(sum(k in w for w in _windows_along(n, m)) for k in range(n))
        for n, m in zip(shape[-2:], _made(module, shape), strict=True)
    ]
    return math.sqrt(math.prod(counts))


def _separable_norm(module: nn.Module, shape: Shape) -> float:
    """Norm of a linear map of images that treats rows and columns alike: the product of those along each axis.

    The matrix along an axis is found by running the module, in float64, on images that differ along it alone. Its
    values on constant images are 1, so that the other axis does nothing.
    """
    h, w = shape[-2:]
    rows = module(torch.eye(h, dtype=torch.float64)[:, None, :, None].expand(h, 1, h, w))[:, 0, :, 0]
    columns = module(torch.eye(w, dtype=torch.float64)[:, None, None, :].expand(w, 1, h, w))[:, 0, 0, :]
    return spectral_norm(rows) * spectral_norm(columns)


def _upsample_units(module: nn.Upsample, shape: Shape) -> float:
    """At most 16 products for each output; and weights from a position, which is rounded in units of the image."""
    return 32 * (_upsample(module, shape) + 1) * sum(shape[-2:])


def _upsample(module: nn.Upsample, shape: Shape) -> float:
    if module.mode not in ("nearest", "nearest-exact", "bilinear", "bicubic") or len(shape) != 3:
        raise TypeError(f"Upsample is bounded for images, by nearest, bilinear or bicubic values, got {module}")
    return _separable_norm(module, shape)


def _padded(module: nn.Module, shape: Shape) -> float:
    if len(shape) != 3:
        raise TypeError(f"{type(module).__name__} is bounded for images, got {module} for the shape {tuple(shape)}")
    return _separable_norm(module, shape)


def _pooling_units(module: nn.AvgPool2d, shape: Shape) -> float:
    k = math.prod(pair("kernel_size", module.kernel_size))
    return float((k + 3) * k)  # a pixel stands in at most k windows


register_rule(nn.MaxPool2d, lipschitz=_pooling, rounding=0.0)
register_rule(nn.AvgPool2d, lipschitz=_pooling, rounding=_pooling_units)
register_rule(
    nn.AdaptiveAvgPool2d,
    lipschitz=_adaptive_norm,
    rounding=lambda m, shape: (math.prod(shape[-2:]) + 3) * _adaptive_norm(m, shape),
)
register_rule(nn.AdaptiveMaxPool2d, lipschitz=_adaptive_maximum, rounding=0.0)
register_rule(
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, lipschitz=_upsample, rounding=_upsample_units
)
register_rule(nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d, lipschitz=_padded, rounding=0.0)
