"""Networks as lists of words, such as ["conv 32 k3", "maxmin", "flatten", "linear 64", "maxmin", "head"]."""

__all__ = ["LAYERS", "Word", "count_layers", "divisor_of", "from_words"]

import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import nn

from orthoconv.models.factory import LayerFactory, width_of
from orthoconv.nn import (
    Abs,
    BatchCentering,
    ChannelShuffle,
    ConvexResidual,
    FullSort,
    GroupSort,
    HouseHolder,
    InvertibleDownsample,
    InvertibleUpsample,
    L2Pool2d,
    LayerCentering,
    LPReLU,
    MaxMin,
    NActivation,
    PixelBias,
    ScaledAdaptiveAvgPool2d,
    ScaledAvgPool2d,
    SoftHuber,
)
from orthoconv.nn.arguments import positive_int

Shape = tuple[int, ...]
Word = str | Mapping[str, Any]  # a line, or {"residual": [...]}

_MAIN = {
    "conv": "conv CHANNELS [kTAPS] [sSTRIDE] [gGROUPS] [dDILATION] [METHOD]",
    "linear": "linear FEATURES [METHOD]",
    "head": "head [METHOD]",
}
_RESIDUAL = "residual: [LAYER, ...]"
_LETTERS = {"k": "kernel_size", "s": "stride", "g": "groups", "d": "dilation"}
_DEEPEST = 10  # residuals inside each other
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_KINDS: dict[type, str] = {bool: "true or false", float: "a number"}


class Kind(NamedTuple):
    """A layer that a word makes besides convolutions and linear layers.

    Attributes:
        make: Makes the layer from the shape of one input, the numbers after the word and its options.
        numbers: Names of these numbers, for messages. One in brackets may be left out.
        images: Whether it takes images, and not vectors.
        options: Names of what may follow as name=value, and the type of each: bool or float.
    """

    make: Callable[..., nn.Module]
    numbers: tuple[str, ...] = ()
    images: bool = False
    options: Mapping[str, type] = {}


LAYERS: dict[str, Kind] = {  # a new activation or pooling is one line here
    "maxmin": Kind(lambda shape: MaxMin()),
    "groupsort": Kind(lambda shape, n: GroupSort(n), ("SIZE",)),
    "fullsort": Kind(lambda shape: FullSort()),
    "relu": Kind(lambda shape: nn.ReLU()),
    "lprelu": Kind(lambda shape, **o: LPReLU(shape[0], **o), options={"slope": float}),
    "abs": Kind(lambda shape, **o: Abs(**o), options={"fraction": float}),
    "halfabs": Kind(lambda shape: Abs(0.5)),
    "softhuber": Kind(lambda shape, **o: SoftHuber(**o), options={"delta": float}),
    "householder": Kind(lambda shape: HouseHolder(shape[0])),
    "nactivation": Kind(lambda shape, **o: NActivation(shape[0], **o), options={"reach": float}),
    "bias": Kind(lambda shape: PixelBias(shape[0], shape[1:]), images=True),
    "centre": Kind(lambda shape, **o: BatchCentering(shape[0], **o), options={"momentum": float, "bias": bool}),
    "layercentre": Kind(lambda shape: LayerCentering(), images=True),
    "shuffle": Kind(lambda shape, groups: ChannelShuffle(groups), ("GROUPS",)),
    "l2pool": Kind(lambda shape, *k: L2Pool2d(*k), ("[SIDE]",), images=True),
    "pool": Kind(lambda shape, k: ScaledAvgPool2d(k), ("SIDE",), images=True),
    "adaptivepool": Kind(lambda shape, n: ScaledAdaptiveAvgPool2d(n), ("WINDOWS",), images=True),
    "downsample": Kind(lambda shape, s: InvertibleDownsample(s), ("STRIDE",), images=True),
    "upsample": Kind(lambda shape, s: InvertibleUpsample(s), ("STRIDE",), images=True),
    "flatten": Kind(lambda shape: nn.Flatten(), images=True),
}


class Call(NamedTuple):
    """A line of a network, read: its word, its numbers, its options by name, and the method of its layer.

    A residual has the lines of its `branch` instead.
    """

    text: Word
    word: str
    numbers: list[int]
    options: dict[str, Any]
    method: str | None
    branch: "tuple[Call, ...]" = ()

    def number(self) -> int:
        """The one number after the word; `_read` refuses a line without it."""
        return self.numbers[0]


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
    return _count([_read(text) for text in words])


def _count(calls: Sequence[Call]) -> int:
    return sum(call.word in _MAIN or _count(call.branch) for call in calls)


def divisor_of(words: Sequence[Word]) -> int:
    """Return what the sides of an image must divide by: the product of the strides, downsamplings and pools.

    >>> divisor_of(["downsample 2", "conv 8 k4 s2", "maxmin", "flatten", "head"])
    4
    """
    divisor, scale = 1, Fraction(1)  # sides here, divided by those of the image
    for call in _flat([_read(text) for text in words]):
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
    calls = [_read(text) for text in words]
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
    _check_options(call, kind)
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


def _check_options(call: Call, kind: Kind) -> None:
    """Raise an error that lists the options of a word, unless it takes these."""
    for key, value in call.options.items():
        if key not in kind.options:
            takes = ", ".join(kind.options) or "none"
            raise ValueError(f"{key}={value!r} is no option of {call.word!r}; those that it takes are {takes}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, bool) if kind.options[key] is bool else number):
            raise ValueError(f"{key} of {call.word!r} must be {_KINDS[kind.options[key]]}, got {value!r}")


def _read(text: Any, depth: int = 0) -> Call:
    """Read a line: a word, numbers, options of one letter or with a name, and the name of a method."""
    if isinstance(text, Mapping):
        return _read_residual(text, depth)
    word, *rest = text.split() if isinstance(text, str) and text.split() else [""]
    usages = {**_MAIN, **{name: " ".join((name, *kind.numbers)) for name, kind in LAYERS.items()}}
    if word not in usages:
        known = ", ".join(map(repr, (*usages.values(), _RESIDUAL)))
        raise ValueError(f"a layer is one of {known}, got {text!r}")
    numbers = [int(part) for part in rest if re.fullmatch(r"[0-9]{1,9}", part)]
    letters = {_LETTERS[part[0]]: int(part[1:]) for part in rest if re.fullmatch(r"[ksgd][1-9][0-9]{0,8}", part)}
    named = dict(part.split("=", 1) for part in rest if re.fullmatch(r"[a-z][a-z0-9_]*=[^=]+", part))
    names = [part for part in rest if re.fullmatch(r"[a-z]\w*", part) and not re.fullmatch(r"[ksgd][0-9]+", part)]
    options = letters | {key: _scalar(value) for key, value in named.items()}
    understood = len(numbers) + len(options) + len(names) == len(rest)  # so none is given twice
    fits = _fits(word, len(numbers)) and (word == "conv" or not letters) and len(names) <= (word in _MAIN)
    if not (understood and fits):
        hint = "; name=value gives other arguments of the layer" if word in _MAIN else ""
        raise ValueError(f"a layer of that kind is {usages[word]!r}, got {text!r}{hint}")
    if 0 in numbers:
        raise ValueError(f"a layer of that kind is {usages[word]!r} with positive numbers, got {text!r}")
    for key in set(_LETTERS.values()) & options.keys() if word == "conv" else ():
        positive_int(f"in {text!r}, {key}", options[key])
    return Call(text, word, numbers, options, names[0] if names else None)


def _fits(word: str, count: int) -> bool:
    """Whether a word takes so many numbers."""
    numbers = LAYERS[word].numbers if word in LAYERS else () if word == "head" else ("NUMBER",)
    return len([n for n in numbers if n[0] != "["]) <= count <= len(numbers)


def _read_residual(text: Mapping[Any, Any], depth: int) -> Call:
    """Read {"residual": [...]}, the layers of a branch."""
    if depth == _DEEPEST:
        raise ValueError(f"residuals may be inside each other {_DEEPEST} deep, and no deeper")
    lines = text.get("residual") if list(text) == ["residual"] else None
    if not lines or isinstance(lines, str) or not isinstance(lines, Sequence):
        raise ValueError(f"a layer that is no text is {_RESIDUAL!r}, got {text!r}")
    branch = tuple(_read(line, depth + 1) for line in lines)
    if any(call.word == "head" for call in branch):
        raise ValueError(f"a network has one head, which comes last and in no residual; got {text!r}")
    return Call(text, "residual", [], {}, None, branch)


def _scalar(text: str) -> Any:
    """Return the value of a scalar of YAML: true, false, null, a number or a text.

    >>> [_scalar(text) for text in ("false", "8", "1e-3", "zeros", "null")]
    [False, 8, 0.001, 'zeros', None]
    """
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    if text.lower() in ("null", "~"):
        return None
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        return int(text)
    if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?", text):
        return float(text)
    return text
