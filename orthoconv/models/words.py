"""Networks as lists of words, such as ["conv 32 k3", "maxmin", "flatten", "linear 64", "maxmin", "head"]."""

__all__ = ["LAYERS", "count_layers", "divisor_of", "from_words"]

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.nn import (
    Abs,
    BatchCentering,
    ChannelShuffle,
    FullSort,
    GroupSort,
    HouseHolder,
    InvertibleDownsample,
    L2Pool2d,
    MaxMin,
    NActivation,
    PixelBias,
    ScaledAvgPool2d,
)

Shape = tuple[int, ...]

_MAIN = {
    "conv": "conv CHANNELS [kTAPS] [sSTRIDE] [METHOD]",
    "linear": "linear FEATURES [METHOD]",
    "head": "head [METHOD]",
}


class Kind(NamedTuple):
    """A layer that a word makes besides convolutions and linear layers.

    Attributes:
        make: Makes the layer from the shape of one input and the numbers after the word.
        numbers: Names of these numbers, for messages.
        images: Whether it takes images, and not vectors.
    """

    make: Callable[..., nn.Module]
    numbers: tuple[str, ...] = ()
    images: bool = False


LAYERS: dict[str, Kind] = {  # a new activation or pooling is one line here
    "maxmin": Kind(lambda shape: MaxMin()),
    "groupsort": Kind(lambda shape, n: GroupSort(n), ("SIZE",)),
    "fullsort": Kind(lambda shape: FullSort()),
    "relu": Kind(lambda shape: nn.ReLU()),
    "abs": Kind(lambda shape: Abs()),
    "halfabs": Kind(lambda shape: Abs(0.5)),
    "householder": Kind(lambda shape: HouseHolder(shape[0])),
    "nactivation": Kind(lambda shape: NActivation(shape[0])),
    "bias": Kind(lambda shape: PixelBias(shape[0], shape[1:]), images=True),
    "centre": Kind(lambda shape: BatchCentering(shape[0])),
    "shuffle": Kind(lambda shape, groups: ChannelShuffle(groups), ("GROUPS",)),
    "l2pool": Kind(lambda shape: L2Pool2d(), images=True),
    "pool": Kind(lambda shape, k: ScaledAvgPool2d(k), ("SIDE",), images=True),
    "downsample": Kind(lambda shape, s: InvertibleDownsample(s), ("STRIDE",), images=True),
    "flatten": Kind(lambda shape: nn.Flatten(), images=True),
}


class Call(NamedTuple):
    """A line of a network, read: its word, its numbers, its options by letter, and the method of its layer."""

    text: str
    word: str
    numbers: list[int]
    options: dict[str, int]
    method: str | None

    def number(self) -> int:
        """The one number after the word; `_read` refuses a line without it."""
        return self.numbers[0]


def count_layers(words: Sequence[str]) -> int:
    """Count the layers that share the Lipschitz bound of a network: convolutions, linear layers and the head.

    >>> count_layers(["conv 8", "maxmin", "flatten", "head"])
    2
    """
    return sum(_read(text).word in _MAIN for text in words)


def divisor_of(words: Sequence[str]) -> int:
    """Return what the sides of an image must divide by: the product of the strides, downsamplings and pools.

    >>> divisor_of(["downsample 2", "conv 8 k4 s2", "maxmin", "flatten", "head"])
    4
    """
    calls = [_read(text) for text in words]
    sides = [call.numbers[0] for call in calls if call.word in ("downsample", "pool") and call.numbers]
    return math.prod(sides) * math.prod(call.options.get("s", 1) for call in calls)


def from_words(
    words: Sequence[str], make: LayerFactory, shape: Shape, classes: int, *, width: float = 1, kernel_size: int = 3
) -> list[nn.Module]:
    """Make the layers that the words say, one after the other.

    The shape of an image is followed through the network, and what cannot be is refused.

    Arguments:
        words: A line for each layer: "conv CHANNELS [kTAPS] [sSTRIDE] [METHOD]", "linear FEATURES [METHOD]",
            "head [METHOD]", which comes last, or one of `LAYERS` with its numbers.
        make: Makes convolutions and linear layers of its own methods, unless a line names another.
        shape: Channels, height and width of an image.
        classes: Number of logits.
        width: Factor of all channels and features.
        kernel_size: Taps of convolutions that name none.

    >>> from_words(["conv 4 k3 s2", "maxmin", "flatten", "head"], LayerFactory("cayley", None, 1.0), (1, 8, 8), 10)[3]
    CayleyLinear(in_features=64, out_features=10, bias=True)
    """
    layers: list[nn.Module] = []
    calls = [_read(text) for text in words]
    if [call.word for call in calls].count("head") != 1 or calls[-1].word != "head":
        raise ValueError(f"a network has one head, which comes last; got {list(words)!r}")
    for k, call in enumerate(calls):
        try:
            made, shape = _layer(call, make, shape, classes, width, kernel_size)
        except ValueError as error:
            raise ValueError(f"layer {k}, {call.text!r}, cannot follow an output of shape {shape}: {error}") from error
        layers += made
    return layers


def _layer(
    call: Call, make: LayerFactory, shape: Shape, classes: int, width: float, kernel_size: int
) -> tuple[list[nn.Module], Shape]:
    """Make the layers of one line; return them and the shape of their output."""
    if call.word == "conv":
        _require(shape, images=True)
        channels, stride = width_of(call.number(), width), call.options.get("s", 1)
        if any(n % stride for n in shape[1:]):
            raise ValueError(f"the stride {stride} does not divide the image")
        made = make.conv(shape[0], channels, call.options.get("k", kernel_size), stride, call.method)
        return made, (channels, *(n // stride for n in shape[1:]))
    if call.word in ("linear", "head"):
        _require(shape, images=False)
        if call.word == "head":
            return make.head(shape[0], classes, call.method), (classes,)
        features = width_of(call.number(), width)
        return make.linear(shape[0], features, call.method), (features,)
    kind = LAYERS[call.word]
    if kind.images:
        _require(shape, images=True)
    layer = kind.make(shape, *call.numbers)
    with torch.no_grad():
        out = layer.eval()(torch.zeros(1, *shape)).shape[1:]
    return [layer.train()], tuple(out)


def _require(shape: Shape, *, images: bool) -> None:
    if images and len(shape) != 3:
        raise ValueError("it takes images, and these are vectors")
    if not images and len(shape) != 1:
        raise ValueError(f"it takes vectors; 'flatten' makes some of {math.prod(shape)} entries")


def _read(text: str) -> Call:
    """Read a line: a word, numbers, options of one letter with a number, and the name of a method."""
    word, *rest = text.split() if isinstance(text, str) and text.split() else [""]
    usages = {**_MAIN, **{name: " ".join((name, *kind.numbers)) for name, kind in LAYERS.items()}}
    if word not in usages:
        raise ValueError(f"a layer is one of {', '.join(map(repr, usages.values()))}, got {text!r}")
    numbers = [int(part) for part in rest if re.fullmatch(r"[0-9]{1,9}", part)]
    options = {part[0]: int(part[1:]) for part in rest if re.fullmatch(r"[ks][1-9][0-9]{0,8}", part)}
    names = [part for part in rest if re.fullmatch(r"[a-z]\w*", part) and not re.fullmatch(r"[ks][0-9]+", part)]
    most = {"conv": 1, "linear": 1, "head": 0}.get(word, len(LAYERS[word].numbers) if word in LAYERS else 0)
    understood = len(numbers) + len(options) + len(names) == len(rest)
    fits = len(numbers) == most and (word == "conv" or not options) and len(names) <= (word in _MAIN)
    if not (understood and fits):
        raise ValueError(f"a layer of that kind is {usages[word]!r}, got {text!r}")
    if 0 in numbers:
        raise ValueError(f"a layer of that kind is {usages[word]!r} with positive numbers, got {text!r}")
    return Call(text, word, numbers, options, names[0] if names else None)
