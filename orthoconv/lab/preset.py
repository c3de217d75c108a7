"""Presets: complete recipes for a data set, each a file of options that says what it costs and what it reaches.

`orthoconv train` begins with the preset of its data set; other options override its fields.
"""

__all__ = ["PAPER", "expand_preset", "preset_for", "preset_names", "preset_opening"]

import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

PAPER = "paper"  # the name of the defaults of `Recipe` and `ModelSpec`, which no file overrides
_PAPER_OPENING = "The recipe of the paper, Section 5.1: its network, loss and schedule, with crops and flips."
_DATA = "digits"  # of `orthoconv train` without --data
_OWN = "own"
_PRESETS = {
    "digits": "digits",
    "digits32": "digits",
    "cifar10": "cifar10-fast",
    "stl10": "cifar10-fast",
    "fashion_mnist": "fashion",
}
_RECORDED = (
    "data",
    "data_dir",
    "examples",
    "resize",
    "split",
    "data_seed",
    "start",
    "model",
    "recipe",
)  # options of `orthoconv train` that a run records


def preset_names() -> list[str]:
    """Return the names of the presets of the package.

    >>> preset_names()
    ['cifar10-best', 'cifar10-fast', 'cifar10-finish', 'digits', 'fashion', 'own']
    """
    return sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml"))


def preset_for(data: str) -> str:
    """Return the name of the preset that a data set is trained by if no other is named.

    >>> preset_for("cifar10"), preset_for("folder")
    ('cifar10-fast', 'own')
    """
    return _PRESETS.get(data, _OWN)


def preset_opening(name: str) -> str:
    """Return what the file of a preset opens with: its command, its cost and its score."""
    if name == PAPER:
        return _PAPER_OPENING
    lines = _path(name).read_text().splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#"))


def expand_preset(args: list[str]) -> list[str]:
    """Put the fields of a preset before the options of `orthoconv train`, so that these override them.

    The preset is the one that --preset names. By default it is that of the data set, without its network if the options
    name one; or, for a run that is resumed, what the run has recorded.

    >>> expand_preset(["train", "--recipe.epochs", "2", "--preset", "digits"])[:4]
    ['train', '--data=digits', '--model.name=kwlarge', '--model.conv=cayley']
    >>> expand_preset(["train", "--data", "cifar10", "--model.name", "resnet9"])[:3]
    ['train', '--preset=cifar10-fast', '--recipe.epochs=16']
    >>> expand_preset(["train", "--preset", "paper"])
    ['train', '--preset', 'paper']
    """
    if args[:1] != ["train"]:
        return args
    options, given = args[1:], _given(args[1:])
    if (named := given.get("preset")) is not None:
        return ["train", *_flat({} if named == PAPER else _fields(str(named))), *options]
    if recorded := _recorded(given):
        return ["train", *_flat(recorded), *options]
    name = preset_for(str(given.get("data", _DATA)))
    fields = {k: v for k, v in _fields(name).items() if k != "data" and (k != "model" or not _names_network(given))}
    return ["train", f"--preset={name}", *_flat(fields), *options]


def _given(options: list[str]) -> dict[str, Any]:
    """Return what the options say: the fields of --config files, then the last value of each option, as text."""
    values = [tuple(a[2:].split("=", 1)) for a in options if a.startswith("--") and "=" in a]
    values += [(a[2:], b) for a, b in pairwise(options) if a.startswith("--") and "=" not in a]
    fields: dict[str, Any] = {}
    for key, path in values:
        if key == "config":
            fields |= _read(Path(path))
    return fields | {key: value for key, value in values if key != "config"}


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of a file, or none if it cannot be read: who uses it says what is wrong with it."""
    try:
        fields = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {str(k): v for k, v in fields.items()} if isinstance(fields, dict) else {}


def _recorded(given: dict[str, Any]) -> dict[str, Any]:
    """Return what the run that is resumed was trained from; nothing if there is none."""
    if str(given.get("resume", "false")).lower() not in ("true", "yes", "1"):
        return {}
    config = _read(Path(str(given.get("out", "runs/train"))) / "config.json")
    return {key: config[key] for key in _RECORDED if config.get(key) is not None}


def _names_network(given: dict[str, Any]) -> bool:
    model = given.get("model")
    inner = {f"model.{key}" for key in model} if isinstance(model, dict) else {"model.name"} if model else set()
    return not {"model.name", "model.layers"}.isdisjoint(given.keys() | inner)


def _flat(fields: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the options that set the fields.

    >>> _flat({"data": "digits", "recipe": {"augment": False, "lr": 0.1, "lipschitz": None}})
    ['--data=digits', '--recipe.augment=false', '--recipe.lr=0.1']
    """
    options = []
    for key, value in fields.items():
        if isinstance(value, dict):
            options += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            options.append(f"--{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}")
    return options


def _fields(name: str) -> dict[str, Any]:
    fields: dict[str, Any] = yaml.safe_load(_path(name).read_text())
    return fields


def _path(name: str) -> Path:
    if name not in preset_names():
        raise ValueError(f"preset must be one of {', '.join([*preset_names(), PAPER])}, got {name!r}")
    return Path(str(_folder() / f"{name}.yaml"))


def _folder() -> Path:
    return Path(str(files("orthoconv.lab") / "presets"))
