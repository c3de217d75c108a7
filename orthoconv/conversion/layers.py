"""Rules for layers with weights, activations and normalisations."""

__all__ = ["fitted", "padding_mode"]

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from orthoconv.conversion.registry import Part, register_conversion
from orthoconv.nn import ChannelShuffle, Fit, MaxMin, Shift
from orthoconv.nn.layer import Combination, Layer

_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish, nn.SELU, nn.CELU,
    nn.RReLU, nn.Softplus, nn.Threshold,
)  # fmt: skip
_ACTIVATION_NAMES = (
    "Swish", "HSwish", "HardSwish", "Hswish", "h_swish", "SwishMe", "MemoryEfficientSwish", "Mish", "MishMe", "SiLU",
    "HardMish", "QuickGELU", "GELU", "GELUTanh", "GeluQuick", "PReLU", "ReLU6", "LeakyReLU", "StarReLU",
)  # fmt: skip
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm,
)  # fmt: skip
_OF_SEQUENCES = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm, nn.MaxPool1d,
                 nn.AvgPool1d)  # whose axis of channels comes before that of the entries  # fmt: skip
_NORM_NAMES = ("LayerNorm2d", "LayerNorm", "FrozenBatchNorm2d", "RMSNorm", "GlobalResponseNorm", "GRN", "SimpleNorm2d",
               "RmsNorm2d", "LayerNormExp2d", "IBN", "InPlaceABN")  # fmt: skip

_NORM_ACTIVATIONS = ("EvoNorm2dB0", "EvoNorm2dB1", "EvoNorm2dB2", "EvoNorm2dS0", "EvoNorm2dS0a", "EvoNorm2dS1",
                     "EvoNorm2dS1a", "EvoNorm2dS2", "EvoNorm2dS2a", "FilterResponseNormTlu2d",
                     "FilterResponseNormAct2d")  # fmt: skip


def fitted(
    core: nn.Module, size: Sequence[int], inner: Sequence[int], made: Sequence[int], out: Sequence[int]
) -> nn.Module:
    """A layer for images of `size` that takes images of `inner` and makes `made`, between layers that fit them."""
    first = [] if tuple(size) == tuple(inner) else [Fit(inner, centred=False)]
    last = [] if tuple(made) == tuple(out) else [Fit(out)]
    return nn.Sequential(*first, core, *last) if first or last else core


def padding_mode(module: Any) -> str:
    """That of the layer which takes the place of a convolution."""
    return "circular" if module.padding_mode == "circular" else "zeros"


def _convolution(part: Part) -> nn.Module:
    m: Any = part.module
    size, out = part.inputs[0][-2:], part.output[-2:]
    made = [-(-n // s) for n, s in zip(size, m.stride, strict=True)]
    inner = [n * s for n, s in zip(made, m.stride, strict=True)]
    core = part.layer(
        lambda: part.conv(
            m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, dilation=m.dilation, groups=m.groups,
            bias=m.bias is not None, padding_mode=padding_mode(m),
        )
    )  # fmt: skip
    return fitted(core, size, inner, made, out)


def _transposed(part: Part) -> nn.Module:
    m: Any = part.module
    size, out = part.inputs[0][-2:], part.output[-2:]
    made = [n * s for n, s in zip(size, m.stride, strict=True)]
    core = part.layer(
        lambda: part.transposed(
            m.in_channels, m.out_channels, m.kernel_size, m.stride, groups=m.groups, bias=m.bias is not None,
            dilation=m.dilation, padding_mode=m.padding_mode,
        )
    )  # fmt: skip
    return fitted(core, size, size, made, out)


def _linear(part: Part) -> nn.Module:
    m: Any = part.module
    return part.layer(lambda: part.linear(m.in_features, m.out_features, m.bias is not None))


def _activation(part: Part) -> nn.Module:
    shape = part.inputs[0]
    tokens = len(shape) == 3 and not isinstance(part.before, _OF_SEQUENCES)  # (b, n, c)
    axis = len(shape) - 1 if tokens or isinstance(part.before, nn.Linear | nn.LayerNorm | nn.RMSNorm) else 1
    if len(shape) < 2 or shape[axis] % 2 or part.scores:  # sorted pairs of scores would favour every other class
        return nn.ReLU()
    return MaxMin() if axis == 1 and len(shape) != 3 else MaxMin(axis)


def _norm(part: Part) -> nn.Module:
    m: Any = part.module
    shape = part.inputs[0]
    if getattr(m, "weight", None) is None and getattr(m, "bias", None) is None:
        return nn.Identity()
    numbers = m.normalized_shape if isinstance(m, nn.LayerNorm | nn.RMSNorm) else (shape[1], *[1] * (len(shape) - 2))
    return part.once(lambda: Shift(numbers))


def _named_norm(part: Part) -> nn.Module:
    """A normalisation that is known by its name alone: of as many channels as it has numbers, at the first axis."""
    shape = part.inputs[0]
    counts = {p.numel() for p in part.module.parameters()} if part.module is not None else set()
    if shape[1] in counts:
        return part.once(lambda: Shift((shape[1], *[1] * (len(shape) - 2))))
    return part.once(lambda: Shift((shape[-1],))) if shape[-1] in counts else nn.Identity()


def _dropout(part: Part) -> nn.Module:
    m: Any = part.module
    new: nn.Module = type(m)(m.p)  # not in place
    return new


def _called_dropout(part: Part) -> nn.Module:
    return nn.Dropout(float(part.options.get("p", part.constants[0] if part.constants else 0.5)))


def _shuffle(part: Part) -> nn.Module:
    m: Any = part.module
    return ChannelShuffle(m.groups)


def _padded(part: Part) -> nn.Module | None:
    """The part itself; 0 in place of -inf, which stands before a maximum, and has no finite bound elsewhere."""
    m: Any = part.module
    return None if math.isfinite(m.value) else nn.ConstantPad2d(m.padding, 0.0)


def _evolved(part: Part) -> nn.Module:
    """A normalisation and an activation in one."""
    return nn.Sequential(_named_norm(part), _activation(part))


def _kept(part: Part) -> None:
    return None


register_conversion(
    nn.Conv2d, make=_convolution,
    proof="An orthogonal convolution, between zeros that are added and pixels that are left out.",
)  # fmt: skip
register_conversion(
    nn.ConvTranspose2d, make=_transposed, proof="The adjoint of an orthogonal convolution, cut or padded by zeros."
)
register_conversion(nn.Linear, make=_linear, proof="An orthogonal matrix.")
register_conversion(
    *_ACTIVATIONS, *_ACTIVATION_NAMES, make=_activation, proof="MaxMin permutes entries; ReLU has slopes 0 and 1."
)
register_conversion(*_NORMS, make=_norm, proof="A number for each channel is added, which keeps distances.")
register_conversion(*_NORM_NAMES, make=_named_norm, proof="Numbers are added, which keeps distances.")
register_conversion(*_NORM_ACTIVATIONS, make=_evolved, proof="Numbers are added; MaxMin permutes entries.")
register_conversion(
    nn.LocalResponseNorm, nn.CrossMapLRN2d, make=lambda part: nn.Identity(), proof="The identity keeps distances."
)
register_conversion(
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    make=_dropout,
    proof="The identity in eval mode.",
)
register_conversion(
    torch.nn.functional.dropout, torch.nn.functional.dropout2d, make=_called_dropout, proof="The identity in eval mode."
)
register_conversion(nn.ChannelShuffle, make=_shuffle, proof="It permutes entries.")
register_conversion(
    nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, make=_kept,
    proof="It permutes entries.",
)  # fmt: skip
register_conversion(
    nn.ConstantPad1d,
    nn.ConstantPad2d,
    nn.ConstantPad3d,
    make=_padded,
    proof="It leaves entries out, or adds constants.",
)
register_conversion(
    nn.Tanh, nn.Sigmoid, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Softshrink, nn.Softmax, make=_kept,
    proof="Its slopes are at most 1.",
)  # fmt: skip
register_conversion(Layer, Combination, make=_kept, proof="It says its own bound, and the whole is looked at.")
