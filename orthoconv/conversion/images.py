"""Rules for pooling, resizing and padding."""

__all__ = ["adaptive", "average", "maximum", "require_values_alone", "scaled"]

from typing import Any

import torch
from torch import nn

from orthoconv.certificates.bounds import lipschitz_bound
from orthoconv.conversion.layers import fitted
from orthoconv.conversion.registry import Part, register_conversion
from orthoconv.nn import Scale, ScaledAdaptiveAvgPool2d, ScaledAvgPool2d, ScaledMean
from orthoconv.nn.arguments import ints, pair

_BY_ITS_NORM = "It is divided by its own norm."


def scaled(part: Part) -> nn.Module:
    """The part, divided by its Lipschitz constant, which is known for this size."""
    assert part.module is not None
    return _divided(part.module, part)


def _divided(module: nn.Module, part: Part) -> nn.Module:
    bound = lipschitz_bound(module, part.inputs[0][1:])
    return module if bound == 1 else nn.Sequential(module, Scale(1 / bound))


def average(part: Part) -> nn.Module:
    """Means over windows, divided by their norm."""
    m: Any = part.module
    k, s, p = pair("kernel_size", m.kernel_size), pair("stride", m.stride), ints(m.padding)
    size, out = part.inputs[0][-2:], part.output[-2:]
    if k == s and p == (0, 0) and all(n % side == 0 for n, side in zip(size, k, strict=True)):
        return ScaledAvgPool2d(k)
    pool = nn.AvgPool2d(k, s, p or 0)  # with all its windows alike, those at the border included
    made = pool(torch.empty(1, 1, *size)).shape[-2:]
    return fitted(_divided(pool, part), size, size, made, out)


def require_values_alone(pool: Any) -> None:
    """Refuse a pool that returns indices."""
    if getattr(pool, "return_indices", False):
        raise ValueError(
            "it returns indices beside its values (return_indices=True); pool and unpool by strides instead"
        )


def maximum(part: Part) -> nn.Module:
    """Maxima over windows that do not overlap, or divided by their norm where the stride is 1."""
    m: Any = part.module
    require_values_alone(m)
    k, s = pair("kernel_size", m.kernel_size), pair("stride", m.stride)
    if pair("dilation", m.dilation) != (1, 1) or any(a > 1 and b == 1 for a, b in zip(k, s, strict=True)):
        return scaled(part)
    size, out = part.inputs[0][-2:], part.output[-2:]
    made = [-(-n // side) for n, side in zip(size, s, strict=True)]
    return fitted(nn.MaxPool2d(s, ceil_mode=True), size, size, made, out)


def adaptive(part: Part) -> nn.Module:
    """Means over as many windows as are asked for, divided by their norm."""
    size, out = part.inputs[0][-2:], part.output[-2:]
    divides = all(n % m == 0 for n, m in zip(size, out, strict=True))
    return ScaledAdaptiveAvgPool2d(tuple(out)) if divides else scaled(part)


def _mean(part: Part) -> nn.Module:
    """The mean or the sum over some axes, with the norm 1."""
    given = dict(zip(("dim", "keepdim"), part.constants, strict=False)) | dict(part.options)
    dim, shape = given.get("dim"), part.inputs[0]
    if dim is None:
        raise ValueError("it takes the mean over all axes, the batch included; name the axes by dim=")
    axes = [d % len(shape) for d in ((dim,) if isinstance(dim, int) else dim)]
    if 0 in axes:
        raise ValueError(f"dim={dim} is the axis of the batch, whose examples must stay apart")
    return ScaledMean(axes, bool(given.get("keepdim", False)))


def _called_maximum(part: Part) -> None:
    raise ValueError("a maximum over an axis has no rule; use nn.AdaptiveMaxPool2d or F.max_pool2d")


register_conversion(nn.AvgPool2d, make=average, proof=_BY_ITS_NORM)
register_conversion(
    nn.MaxPool2d, make=maximum,
    proof="Each pixel stands in one window, and a maximum has slopes 0 and 1; windows that overlap: " + _BY_ITS_NORM,
)  # fmt: skip
register_conversion(nn.AdaptiveAvgPool2d, make=adaptive, proof=_BY_ITS_NORM)
register_conversion(
    nn.AdaptiveMaxPool2d, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ReflectionPad2d,
    nn.ReplicationPad2d, nn.CircularPad2d, make=scaled, proof=_BY_ITS_NORM,
)  # fmt: skip
register_conversion(
    torch.mean, "mean", torch.sum, "sum", make=_mean,
    proof="The sum of n entries over the root of n is a product with a unit vector.",
)  # fmt: skip
register_conversion(torch.amax, "amax", make=_called_maximum, proof="It is refused.")
