"""Networks as lists of words, such as ["conv 32 k3", "maxmin", "flatten", "linear 64", "maxmin", "head"]."""

__all__ = ["LAYERS", "Kind", "Word", "count_layers", "divisor_of", "from_words"]

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.models.lines import LAYERS, MAIN, Call, Kind, Word, check_options, read_line
from orthoconv.nn import ConvexResidual

Shape = tuple[int, ...]


class Common(NamedTuple):
    """What all lines of a network share; see `from_words`."""

    make: LayerFactory
    classes: int
    width: float
    kernel_size: int


def count_layers(words: Sequence[Word]) -> int:
    """Count the layers that share the Lipschitz bound of a network: convolutions, linear layers and the head.

    Those in the branch of a residual count, too: the bound of its other branch is theirs.

    >>> count_layers(["conv 8", "maxmin", {"residual": ["conv 8", "maxmin"]}, "flatten", "head"])
    3
    """
    return _count([read_line(text) for text in words])


def _count(calls: Sequence[Call]) -> int:
    return sum(call.word in MAIN or _count(call.branch) for call in calls)


def divisor_of(words: Sequence[Word]) -> int:
    """Return the number that must divide the sides of an image, from the strides, pools, down- and upsamplings.

    >>> divisor_of(["downsample 2", "conv 8 k4 s2", "maxmin", "flatten", "head"])
    4
    """
    divisor, scale = 1, Fraction(1)  # sides here, divided by those of the image
    for call in _flat([read_line(text) for text in words]):
        numbers = call.numbers or [1]
        if call.word == "upsample":
            scale *= numbers[0]
        elif call.word == "conv":
            scale /= call.options.get("stride", 1)
        elif call.word in ("downsample", "pool", "l2pool", "adaptivepool"):
            scale /= numbers[0]
        divisor = math.lcm(divisor, scale.denominator)
        if call.word == "adaptivepool" or (call.word == "l2pool" and not call.numbers):
            break  # from here on, sides do not depend on those of the image
    return divisor


def _flat(calls: Sequence[Call]) -> list[Call]:
    """Return the lines with those of branches, which keep the sides of an image, in the places of residuals."""
    return [inner for call in calls for inner in (_flat(call.branch) if call.branch else [call])]


def from_words(
    words: Sequence[Word], make: LayerFactory, shape: Shape, classes: int, *, width: float = 1, kernel_size: int = 3
) -> list[nn.Module]:
    """Make the layers that the words say, one after the other.

    The shape of an image is followed through the network, and what cannot be is refused.

    A line is a word, its numbers, and options in any order. Options are kTAPS, sSTRIDE, gGROUPS and dDILATION of a
    convolution, the name of a method, and name=value for any other argument of the layer, such as "conv 64 k3 g2
    bias=false" or "conv 64 bro rank=8". A value is true, false, null, a number or a text, as in YAML.

    Arguments:
        words: A line for each layer: "conv CHANNELS [kTAPS] [sSTRIDE] [gGROUPS] [dDILATION] [METHOD]",
            "linear FEATURES [METHOD]", "head [METHOD]", which comes last, or one of `LAYERS` with its numbers. Or
            {"residual": [...]}, the layers of the branch of a `ConvexResidual`, which keep the shape.
        make: Makes convolutions and linear layers of its own methods, unless a line names another.
        shape: Channels, height and width of an image.
        classes: Number of logits.
        width: Factor of all channels and features.
        kernel_size: Taps of convolutions that name none.

    >>> from_words(["conv 4 k3 s2", "maxmin", "flatten", "head"], LayerFactory("cayley", None, 1.0), (1, 8, 8), 10)[3]
    CayleyLinear(in_features=64, out_features=10, bias=True)
    """
    calls = [read_line(text) for text in words]
    if [call.word for call in calls].count("head") != 1 or calls[-1].word != "head":
        raise ValueError(f"a network has one head, which comes last; got {list(words)!r}")
    return _sequence(calls, shape, Common(make, classes, width, kernel_size))[0]


def _sequence(calls: Sequence[Call], shape: Shape, common: Common) -> tuple[list[nn.Module], Shape]:
    """Make the layers of some lines; return them and the shape of their output."""
    layers: list[nn.Module] = []
    for k, call in enumerate(calls):
        try:
            made, shape = _layer(call, shape, common)
        except ValueError as error:
            raise ValueError(f"layer {k}, {call.text!r}, cannot follow an output of shape {shape}: {error}") from error
        layers += made
    return layers, shape


def _layer(call: Call, shape: Shape, common: Common) -> tuple[list[nn.Module], Shape]:
    """Make the layers of one line; return them and the shape of their output."""
    make = common.make
    if call.word == "conv":
        return _convolution(call, shape, common)
    if call.word == "residual":
        return _residual(call, shape, common)
    if call.word in ("linear", "head"):
        _require(shape, images=False)
        if call.word == "head":
            return make.head(shape[0], common.classes, call.method, call.options), (common.classes,)
        features = width_of(call.number(), common.width)
        return make.linear(shape[0], features, call.method, call.options), (features,)
    kind = LAYERS[call.word]
    if kind.images:
        _require(shape, images=True)
    check_options(call, kind)
    layer = kind.make(shape, *call.numbers, **call.options)
    with torch.no_grad():
        out = layer.eval()(torch.zeros(1, *shape)).shape[1:]
    return [layer.train()], tuple(out)


def _convolution(call: Call, shape: Shape, common: Common) -> tuple[list[nn.Module], Shape]:
    _require(shape, images=True)
    options = dict(call.options)
    taps, stride = options.pop("kernel_size", common.kernel_size), options.pop("stride", 1)
    channels = width_of(call.number(), common.width)
    if any(n % stride for n in shape[1:]):
        raise ValueError(f"the stride {stride} does not divide the image")
    made = common.make.conv(shape[0], channels, taps, stride, call.method, options)
    if (side := options.get("position")) is not None and (side, side) != shape[1:]:
        raise ValueError(
            f"position={side} must be the side of the image, which has {shape[1]} x {shape[2]} pixels here"
        )
    return made, (channels, *(n // stride for n in shape[1:]))


def _residual(call: Call, shape: Shape, common: Common) -> tuple[list[nn.Module], Shape]:
    """Make a convex combination of a branch and the identity, which is scaled like the layers that it bypasses."""
    branch, out = _sequence(call.branch, shape, common)
    if out != shape:
        raise ValueError(f"the branch of a residual must keep that shape, and makes {out} of it")
    skip = nn.Sequential(*common.make.scale(_count(call.branch)))
    return [ConvexResidual(nn.Sequential(*branch), skip)], shape


def _require(shape: Shape, *, images: bool) -> None:
    if images and len(shape) != 3:
        raise ValueError("it takes images, and these are vectors")
    if not images and len(shape) != 1:
        raise ValueError(f"it takes vectors; 'flatten' makes some of {math.prod(shape)} entries")
