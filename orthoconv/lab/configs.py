"""Files of configuration, which may come from anyone: YAML that is a tree, so that reading it comes to an end."""

__all__ = ["read_trees_only"]

from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader, set_loader

_LARGEST = 10_000  # values; a configuration of ours has some forty


@cache
def read_trees_only() -> None:
    """Let the command line refuse YAML that contains itself, or that its aliases make larger than it looks."""
    load = get_loader("yaml")

    def load_tree(text: str) -> Any:
        try:
            value = load(text)
        except (RecursionError, ValueError) as error:
            raise yaml.YAMLError(f"it cannot be read: {error}") from error
        _require_tree(value)
        return value

    set_loader("yaml", load_tree, (yaml.YAMLError,))


def _require_tree(value: Any) -> None:
    """Count the values, each as often as it occurs.

    >>> _require_tree({"a": [1, 2]})
    """
    left, seen = [value], 0
    while left:
        one = left.pop()
        seen += 1
        if seen > _LARGEST:
            raise yaml.YAMLError(f"it contains itself, or more than {_LARGEST} values")
        left.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
