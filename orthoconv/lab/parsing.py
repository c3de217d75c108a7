"""What the command line accepts from files and arguments that may come from anyone."""

__all__ = ["restrict_parsing"]

from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader, set_loader, set_parsing_settings

_MOST_VALUES = 10_000  # a configuration of ours has some forty


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
        if seen > _MOST_VALUES:
            raise yaml.YAMLError(f"it contains itself, or more than {_MOST_VALUES} values")
        left.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
