"""Lines of a network, read: a word, numbers, options, the name of a method; and what the words make."""

__all__ = ["LAYERS", "MAIN", "Call", "Kind", "Word", "check_options", "read_line"]

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from orthoconv.nn import (
    Abs,
    BatchCentering,
    ChannelShuffle,
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

Word = str | Mapping[str, Any]  # a line, or {"residual": [...]}

MAIN = {
    "conv": "conv CHANNELS [kTAPS] [sSTRIDE] [gGROUPS] [dDILATION] [METHOD]",
    "linear": "linear FEATURES [METHOD]",
    "head": "head [METHOD]",
}
_RESIDUAL = "residual: [LAYER, ...]"
_LETTERS = {"k": "kernel_size", "s": "stride", "g": "groups", "d": "dilation"}
_DEEPEST = 10  # residuals inside each other
_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_KINDS: dict[type, str] = {bool: "true or false", float: "a number"}
_VALUES: dict[type, str] = {bool: "false", float: "NUMBER"}


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
        """The one number after the word; `read_line` refuses a line without it."""
        return self.numbers[0]


def check_options(call: Call, kind: Kind) -> None:
    """Raise an error that lists the options of a word, unless it takes these."""
    for key, value in call.options.items():
        if key not in kind.options:
            takes = ", ".join(kind.options) or "none"
            raise ValueError(f"{key}={value!r} is no option of {call.word!r}; those that it takes are {takes}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, bool) if kind.options[key] is bool else number):
            raise ValueError(f"{key} of {call.word!r} must be {_KINDS[kind.options[key]]}, got {value!r}")


def read_line(text: Any, depth: int = 0) -> Call:
    """Read a line: a word, numbers, options of one letter or with a name, and the name of a method."""
    if isinstance(text, Mapping):
        return _read_residual(text, depth)
    word, *rest = text.split() if isinstance(text, str) and text.split() else [""]
    usages = {**MAIN, **{name: _usage(name, kind) for name, kind in LAYERS.items()}}
    if word not in usages:
        known = ", ".join(map(repr, (*usages.values(), _RESIDUAL)))
        raise ValueError(f"a layer is one of {known}, got {text!r}")
    numbers = [int(part) for part in rest if re.fullmatch(r"[0-9]{1,9}", part)]
    letters = [(_LETTERS[part[0]], int(part[1:])) for part in rest if re.fullmatch(r"[ksgd][1-9][0-9]{0,8}", part)]
    named = [part.split("=", 1) for part in rest if re.fullmatch(r"[a-z][a-z0-9_]*=[^=]+", part)]
    names = [part for part in rest if re.fullmatch(r"[a-z]\w*", part) and not re.fullmatch(r"[ksgd][0-9]+", part)]
    given = [*letters, *((key, _scalar(value)) for key, value in named)]
    options = dict(given)
    keys, takes_letters = [key for key, _ in given], word == "conv" or not letters
    if takes_letters and (twice := [key for key in keys if keys.count(key) > 1]):
        raise ValueError(f"{twice[0]} is given twice in {text!r}")
    understood = len(numbers) + len(options) + len(names) == len(rest)
    fits = _fits(word, len(numbers)) and takes_letters and len(names) <= (word in MAIN)
    if not (understood and fits):
        hint = "; name=value gives other arguments of the layer" if word in MAIN else ""
        raise ValueError(f"a layer of that kind is {usages[word]!r}, got {text!r}{hint}")
    if 0 in numbers:
        raise ValueError(f"a layer of that kind is {usages[word]!r} with positive numbers, got {text!r}")
    for key in set(_LETTERS.values()) & options.keys() if word == "conv" else ():
        positive_int(f"in {text!r}, {key}", options[key])
    return Call(text, word, numbers, options, names[0] if names else None)


def _usage(word: str, kind: Kind) -> str:
    """How a line with that word looks, for messages."""
    return " ".join((word, *kind.numbers, *(f"[{key}={_VALUES[of]}]" for key, of in kind.options.items())))


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
    branch = tuple(read_line(line, depth + 1) for line in lines)
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
