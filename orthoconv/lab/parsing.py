"""What the command line accepts from files and arguments that may come from anyone."""

__all__ = ["CommandParser", "flags_of", "read_arguments", "restrict_parsing", "tree_of"]

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentParser, get_loader, set_loader, set_parsing_settings

_MOST_VALUES = 10_000  # a configuration of ours has some forty
_RADIUS = re.compile(r"(.*[._])?eps\d*\+?")  # names of options that are radii: eps, certified_eps, recipe.eps0
_FRACTION = re.compile(r"(?<![\w./])(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)(?![\w./])")
_TRUTHS = ("true", "false", "yes", "no", "on", "off", "null")


class CommandParser(ArgumentParser):
    """A parser whose help ends with the example in the docstring of its command."""

    def add_function_arguments(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
        """Add the parameters of a function as options."""
        found = re.search(r"^ *(Example: .*)$", function.__doc__ or "", flags=re.M)
        self.epilog = found.group(1) if found else None
        return super().add_function_arguments(function, *args, **options)


@cache
def restrict_parsing() -> None:
    """Import nothing that a configuration names, and refuse YAML that contains itself or grows by its aliases."""
    set_parsing_settings(import_path_denylist=["*"])
    load = get_loader("yaml")

    def load_tree(text: str) -> Any:
        try:
            value = load(text)
        except (RecursionError, ValueError) as error:
            raise yaml.YAMLError(f"it cannot be read: {error}") from error
        return tree_of(value)

    set_loader("yaml", load_tree, (yaml.YAMLError,))


def read_arguments(args: list[str], flags: set[str]) -> list[str]:
    """Return arguments in which each radius is a number, and each flag without a value has the value true.

    Arguments:
        args: Arguments of a command.
        flags: Names of its options that are true or false.

    >>> read_arguments(["--resume", "--eps", "51/255", "--out", "1/2"], {"resume"})
    ['--resume=true', '--eps', '0.2', '--out', '1/2']
    """
    read: list[str] = []
    for k, one in enumerate(args):
        name, equals, value = one.removeprefix("--").partition("=")
        before = args[k - 1].removeprefix("--") if k and args[k - 1].startswith("--") else ""
        if not one.startswith("--"):
            read.append(_radii(before, one) if _RADIUS.fullmatch(before) else one)
        elif equals:
            read.append(f"--{name}={_radii(name, value)}" if _RADIUS.fullmatch(name) else one)
        else:
            bare = name in flags and args[k + 1 : k + 2] not in [[word] for word in _TRUTHS]
            read.append(f"{one}=true" if bare else one)
    return read


def flags_of(command: Callable[..., Any]) -> set[str]:
    """Return the names of the options of a command that are true or false."""
    names: set[str] = set()
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(kind := parameter.annotation):
            names |= {f"{name}.{field.name}" for field in fields(kind) if field.type is bool}
        elif kind in (bool, bool | None):
            names.add(name)
    return names


def tree_of(value: Any) -> Any:
    """Return what a YAML file says, with a number for each radius that is written as a fraction.

    Raises:
        yaml.YAMLError: If the value contains itself, or grows by its aliases.

    >>> tree_of({"recipe": {"eps0": "51/255"}, "certified_eps": ["51/255", 1], "out": "1/2"})
    {'recipe': {'eps0': 0.2}, 'certified_eps': [0.2, 1], 'out': '1/2'}
    """
    _require_tree(value)
    return _with_fractions(value, "")


def _with_fractions(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {k: _with_fractions(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_fractions(v, name) for v in value]
    if isinstance(value, str) and _RADIUS.fullmatch(name) and _FRACTION.fullmatch(value.strip()):
        number = _numbers(value.strip())
        return value if "/" in number else float(number)
    return value


def _radii(name: str, text: str) -> str:
    """Return the value of an option that is a radius or a list of them, with numbers for fractions.

    Raises:
        ValueError: If it is neither.
    """
    read = _numbers(text)
    try:
        value = yaml.safe_load(read)
    except yaml.YAMLError:
        value = text
    if not all(map(_is_number, value if isinstance(value, list) else [value])):
        raise ValueError(
            f"{name.rstrip('+')} must be a number, a fraction such as 36/255, or a list of these, got {text!r}"
        )
    return read


def _is_number(value: Any) -> bool:
    """Whether a value of YAML is a number or null; it takes 1e-3 for a text."""
    try:
        return value is None or (not isinstance(value, bool) and float(value) == float(value))
    except (TypeError, ValueError):
        return False


def _numbers(text: str) -> str:
    """Return a text in which fractions are numbers; one with the denominator 0 stays, and is refused as a number.

    >>> _numbers("[36/255, 1]"), _numbers("1/0")
    ('[0.1411764705882353, 1]', '1/0')
    """

    def quotient(found: re.Match[str]) -> str:
        a, b = (float(part) for part in found.groups())
        return repr(a / b) if b else found.group(0)

    return _FRACTION.sub(quotient, text)


def _require_tree(value: Any) -> None:
    """Count the values, each as often as it occurs.

    >>> _require_tree({"a": [1, 2]})
    """
    left, seen = [value], 0
    while left:
        one = left.pop()
        seen += 1
        if seen > _MOST_VALUES:
            raise yaml.YAMLError(f"it contains itself, or more than {_MOST_VALUES} values")
        left.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
