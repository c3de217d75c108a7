"""Presets: complete recipes for a data set, each a file of options that says what it costs and what it reaches."""

__all__ = ["expand_preset", "preset_names", "preset_opening"]

from importlib.resources import files
from itertools import pairwise
from pathlib import Path

_OPTION = "--preset"


def preset_names() -> list[str]:
    """Return the names of the presets of the package.

    >>> preset_names()
    ['cifar10-best', 'cifar10-fast', 'digits', 'fashion']
    """
    return sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml"))


def preset_opening(name: str) -> str:
    """Return what the file of a preset opens with: its command, its cost and its score."""
    lines = _path(name).read_text().splitlines()
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#"))


def expand_preset(args: list[str]) -> list[str]:
    """Put the file of a preset before the other options of `orthoconv train`, so that these override its fields.

    >>> [Path(a).name for a in expand_preset(["train", "--recipe.epochs", "2", "--preset", "digits"])]
    ['train', '--config', 'digits.yaml', '--recipe.epochs', '2', '--preset', 'digits']
    >>> expand_preset(["train", "--data", "digits"])
    ['train', '--data', 'digits']
    """
    if args[:1] != ["train"]:
        return args
    values = [a.partition("=")[2] for a in args if a.startswith(f"{_OPTION}=")]
    values += [b for a, b in pairwise(args) if a == _OPTION]
    return ["train", "--config", str(_path(values[-1])), *args[1:]] if values else args


def _path(name: str) -> Path:
    if name not in preset_names():
        raise ValueError(f"preset must be one of {', '.join(preset_names())}, got {name!r}")
    return Path(str(_folder() / f"{name}.yaml"))


def _folder() -> Path:
    return Path(str(files("orthoconv.lab") / "presets"))
