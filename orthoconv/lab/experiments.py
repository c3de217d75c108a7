"""What the paper reports and how to run it again: the files of the folder experiments."""

__all__ = ["BUDGETS", "Case", "Experiment", "Row", "experiments_folder", "load_experiment", "names"]

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from orthoconv.lab.kinds import KINDS
from orthoconv.lab.runs import digest

BUDGETS = ("smoke", "short", "paper")
_FIELDS = {
    "title", "place", "kind", "base", "series", "sweep", "columns", "rows", "paper", "budgets",
}  # fmt: skip


class Row(NamedTuple):
    """A line of a table: the figure that it shows, what it is called, and how many decimals it has."""

    key: str
    label: str
    decimals: int


@dataclass(frozen=True)
class Case:
    """One run of an experiment: its column, its place in a sweep if there is one, its seed and configuration."""

    series: str
    x: float | None
    seed: int
    config: dict[str, Any]
    evaluation: dict[str, Any]

    @property
    def hash(self) -> str:
        """What makes the run another one."""
        return digest(self.config)


class Experiment:
    """A table or a figure of the paper: what is run for it under each budget, and what the paper reports.

    Arguments:
        name: Name of the file.
        fields: Its content.
    """

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        if not isinstance(fields, dict):
            raise ValueError(f"{name}.yaml has no fields; there are {', '.join(sorted(_FIELDS))}")
        if unknown := set(fields) - _FIELDS:
            raise ValueError(
                f"{name}.yaml has the field {min(unknown, key=str)!r}; there are {', '.join(sorted(_FIELDS))}"
            )
        if missing := {"title", "place", "kind", "rows", "budgets"} - set(fields):
            raise ValueError(f"{name}.yaml lacks the field {min(missing)!r}")
        if fields["kind"] not in KINDS:
            raise ValueError(f"{name}.yaml: kind must be one of {', '.join(KINDS)}, got {fields['kind']!r}")
        self.name, self.title, self.place, self.kind = name, fields["title"], fields["place"], KINDS[fields["kind"]]
        self.rows = [Row(*row) for row in fields["rows"]]
        self.series: dict[str, dict[str, Any]] = {k: v or {} for k, v in fields.get("series", {"": {}}).items()}
        self.columns: list[str] = fields.get("columns", list(self.series))
        self.sweep: dict[str, Any] | None = fields.get("sweep")
        self.paper: dict[str, dict[str, list[float]]] = fields.get("paper", {})
        self._base, self._budgets = fields.get("base", {}), fields["budgets"]

    def note(self, budget: str) -> str:
        """What a budget is."""
        return str(self._budget(budget).get("note", ""))

    def cases(self, budget: str) -> list[Case]:
        """The runs that a budget asks for, seed by seed, so that the first seed is complete first."""
        try:
            return self._cases(self._budget(budget))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self.name}.yaml, {budget}: {error}") from error

    def _cases(self, chosen: dict[str, Any]) -> list[Case]:
        own = {k: v for k, v in chosen.items() if k not in {"note", "seeds", "evaluate", "values", "series"}}
        values = [None] if self.sweep is None else chosen.get("values", self.sweep["values"])
        cases = []
        for seed in chosen.get("seeds", [0]):
            for x in values:
                at = {} if x is None or self.sweep is None else _nested(self.sweep["sets"], x)
                for name, series in self.series.items():
                    special = chosen.get("series", {}).get(name, {})
                    config = self.kind.resolve(_merge(self._base, series, own, special, at), seed)
                    cases.append(Case(name, x, seed, config, chosen.get("evaluate", {})))
        return cases

    def _budget(self, budget: str) -> dict[str, Any]:
        if budget not in self._budgets:
            raise ValueError(f"{self.name} has the budgets {', '.join(self._budgets)}, got {budget!r}")
        found: dict[str, Any] = self._budgets[budget]
        return found


def experiments_folder() -> Path:
    """The folder experiments of this directory, or of the checkout that the package is in."""
    for folder in (Path("experiments"), Path(__file__).parents[2] / "experiments"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError("there is no folder experiments here; reproduce runs in a checkout of the repository")


def names() -> list[str]:
    """Names of all experiments, in the order of the paper."""
    files = sorted(experiments_folder().glob("*.yaml"), key=_number)
    return [path.stem for path in files]


def load_experiment(name: str) -> Experiment:
    """The experiment called `name`."""
    path = experiments_folder() / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"the experiments are {', '.join(names())}; got {name!r}")
    try:
        return Experiment(name, yaml.safe_load(path.read_text()))
    except (yaml.YAMLError, AttributeError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not an experiment: {error}") from error


def _number(path: Path) -> int:
    """Number of an experiment, with which its file opens."""
    try:
        return int(path.read_text().removeprefix("#").split(".")[0])
    except ValueError as error:
        raise ValueError(f"{path} does not open with its number, as in # 1. Title") from error


def _merge(*parts: dict[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as one, the later before the earlier.

    >>> _merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = _merge(merged[key], value) if both else value
    return merged


def _nested(paths: list[str], value: float) -> dict[str, Any]:
    """`value` at each of the dotted paths.

    >>> _nested(["a.b", "c"], 1)
    {'a': {'b': 1}, 'c': 1}
    """
    found: dict[str, Any] = {}
    for path in paths:
        *outer, last = path.split(".")
        part: dict[str, Any] = {last: value}
        for key in reversed(outer):
            part = {key: part}
        found = _merge(found, part)
    return found
