"""Rules for sequences and volumes, by those for images: a sequence is an image of one row, a volume one of slices."""

__all__: list[str] = []

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from orthoconv.certificates.sequences import Axes, adaptive_maxima, adaptive_means, maxima, means
from orthoconv.conversion.images import adaptive, average, maximum, require_values_alone, scaled
from orthoconv.conversion.layers import fitted, padding_mode
from orthoconv.conversion.registry import Part, register_conversion

Make = Callable[[Part], nn.Module]
Pool = Callable[[Any, Axes], nn.Module]  # makes the pool of images along these axes


def _rows(core: nn.Module, n: int) -> nn.Module:
    """A module of images, for sequences of length n as images of one row."""
    return nn.Sequential(nn.Unflatten(2, (1, n)), core, nn.Flatten(2, 3))


def _sequences(part: Part) -> nn.Module:
    m: Any = part.module
    (n,), (out,), (s,) = part.inputs[0][2:], part.output[2:], m.stride
    core = part.layer(
        lambda: part.conv(
            m.in_channels, m.out_channels, (1, *m.kernel_size), stride=(1, s), dilation=(1, *m.dilation),
            groups=m.groups, bias=m.bias is not None, padding_mode=padding_mode(m),
        )
    )  # fmt: skip
    made = -(-n // s)
    return _rows(fitted(core, (1, n), (1, made * s), (1, made), (1, out)), n)


def _transposed_sequences(part: Part) -> nn.Module:
    m: Any = part.module
    (n,), (out,), (s,) = part.inputs[0][2:], part.output[2:], m.stride
    core = part.layer(
        lambda: part.transposed(
            m.in_channels, m.out_channels, (1, *m.kernel_size), (1, s), groups=m.groups, bias=m.bias is not None,
            dilation=(1, *m.dilation), padding_mode=m.padding_mode,
        )
    )  # fmt: skip
    return _rows(fitted(core, (1, n), (1, n), (1, n * s), (1, out)), n)


def _volumes(part: Part) -> nn.Module:
    m: Any = part.module
    size, out = part.inputs[0][2:], part.output[2:]
    made = [-(-n // s) for n, s in zip(size, m.stride, strict=True)]
    core = part.layer(
        lambda: part.volumes(
            m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, dilation=m.dilation, groups=m.groups,
            bias=m.bias is not None, padding_mode=padding_mode(m),
        )
    )  # fmt: skip
    before = [(0, n * s - side) for n, s, side in zip(made, m.stride, size, strict=True)]
    after = [((b - a) // 2, b - a - (b - a) // 2) for a, b in zip(made, out, strict=True)]
    return nn.Sequential(*_fit(before), core, *_fit(after))


def _fit(sides: list[tuple[int, int]]) -> list[nn.Module]:
    """Layer that adds zeros before and after each axis of a volume, or cuts; none if there is nothing to do."""
    amounts: Any = tuple(amount for side in reversed(sides) for amount in side)
    return [nn.ConstantPad3d(amounts, 0.0)] if any(amounts) else []


def _image(part: Part, module: nn.Module, size: Sequence[int], output: Sequence[int]) -> Part:
    """The part as a pool of images, (c, h, w) to (c, h', w')."""
    b = part.output[0]
    return replace(part, module=module, inputs=(torch.Size((b, *size)),), output=torch.Size((b, *output)))


def _pool_of_rows(rule: Make, pool: Pool) -> Make:
    """A pool of sequences, as one of images of one row."""

    def make(part: Part) -> nn.Module:
        require_values_alone(part.module)
        (c, n), out = part.inputs[0][1:], part.output[-1]
        return _rows(rule(_image(part, pool(part.module, (None, 0)), (c, 1, n), (c, 1, out))), n)

    return make


def _pool_of_volumes(rule: Make, pool: Pool) -> Make:
    """A pool of volumes: one of each slice, and then one along the depth, of images with a column for each pixel."""

    def make(part: Part) -> nn.Module:
        require_values_alone(part.module)
        (c, d, *size), (depth, *out) = part.inputs[0][1:], part.output[2:]
        pixels = math.prod(out)
        slices = _image(part, pool(part.module, (1, 2)), (c * d, *size), (c * d, *out))
        columns = _image(part, pool(part.module, (0, None)), (c, d, pixels), (c, depth, pixels))
        return _by_slices(c, d, (depth, *out), rule(slices), rule(columns))

    return make


def _by_slices(c: int, d: int, out: tuple[int, ...], slices: nn.Module, columns: nn.Module) -> nn.Module:
    """For volumes (c, d, h, w): a module of images for each slice, and one for images with a column for each pixel."""
    return nn.Sequential(
        nn.Flatten(1, 2), slices, nn.Unflatten(1, (c, d)), nn.Flatten(3, 4), columns, nn.Unflatten(3, out[1:])
    )


def _resizing(part: Part) -> nn.Module:
    """Resizing of images; that of sequences as images of one row, that of volumes slice by slice, then by depth."""
    m: Any = part.module
    (c, *size), out = part.inputs[0][1:], tuple(part.output[2:])
    if m.mode == "area":
        return _resized_means(part)
    if len(size) == 2:
        return scaled(part)
    mode = m.mode.replace("trilinear", "bilinear") if len(size) == 3 else m.mode.replace("linear", "bilinear")

    def resize(before: Sequence[int], after: tuple[int, ...]) -> nn.Module:
        module = nn.Upsample(cast("Any", after), mode=mode, align_corners=m.align_corners)
        return scaled(_image(part, module, before, (before[0], *after)))

    if len(size) == 1:
        return _rows(resize((c, 1, *size), (1, *out)), *size)
    pixels = math.prod(out[1:])
    return _by_slices(
        c, size[0], out, resize((c * size[0], *size[1:]), out[1:]), resize((c, size[0], pixels), (out[0], pixels))
    )


def _resized_means(part: Part) -> nn.Module:
    """Resizing by means over areas, which are those of an adaptive pool."""
    out = tuple(part.output[2:])
    kinds: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
    rules: dict[int, Make] = {1: _pool_of_rows(adaptive, adaptive_means), 2: adaptive,
                              3: _pool_of_volumes(adaptive, adaptive_means)}  # fmt: skip
    return rules[len(out)](replace(part, module=kinds[len(out)](out if len(out) > 1 else out[0])))


register_conversion(
    nn.Upsample, make=_resizing, proof="It is divided by its own norm; volumes are resized one axis after the other."
)
register_conversion(
    nn.Conv1d, make=_sequences, proof="An orthogonal convolution of images with one row, cut or padded by zeros."
)
register_conversion(
    nn.ConvTranspose1d, make=_transposed_sequences,
    proof="The adjoint of an orthogonal convolution of images with one row, cut or padded by zeros.",
)  # fmt: skip
register_conversion(
    nn.Conv3d, make=_volumes,
    proof="An orthogonal convolution of volumes, between zeros that are added and voxels that are left out.",
)  # fmt: skip
_BY_AXES = "one axis after the other, each divided by its norm."
for _kinds, _rule, _pool, _proof in (
    (
        (nn.MaxPool1d, nn.MaxPool3d),
        maximum,
        maxima,
        "An entry stands in one window along an axis; others: " + _BY_AXES,
    ),
    ((nn.AvgPool1d, nn.AvgPool3d), average, means, f"Means along {_BY_AXES}"),
    ((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool3d), adaptive, adaptive_means, f"Means along {_BY_AXES}"),
    ((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool3d), scaled, adaptive_maxima, f"Maxima along {_BY_AXES}"),
):
    register_conversion(_kinds[0], make=_pool_of_rows(_rule, _pool), proof=_proof)
    register_conversion(_kinds[1], make=_pool_of_volumes(_rule, _pool), proof=_proof)
