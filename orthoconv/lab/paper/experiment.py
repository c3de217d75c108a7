"""Experiments: the tables and figures of the paper, how to run each again, and what the paper reports."""

__all__ = ["BUDGETS", "Case", "Experiment", "Row", "experiments_folder", "load_experiment", "merge", "names"]

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from orthoconv.lab.configs import digest
from orthoconv.lab.paper.runners import RUNNERS
from orthoconv.lab.parsing import tree_of
from orthoconv.nn import conv_methods

BUDGETS = ("smoke", "digits", "brief", "short", "paper")  # in the order of their cost; most experiments lack two
_FIELDS = {"title", "place", "runner", "base", "series", "sweep", "columns", "rows", "paper", "budgets"}
_FIELDS |= {"plot", "transposed"}
_METHOD = "{method}"
_REQUIRED = {"title", "place", "runner", "rows", "budgets"}


class Row(NamedTuple):
    """A line of a table: the name of its figure, its label, and its number of decimals."""

    key: str
    label: str
    decimals: int


@dataclass(frozen=True)
class Case:
    """One run of an experiment.

    Attributes:
        series: Column of the table.
        x: Value in the sweep, if the experiment has one.
        seed: Seed of the run.
        config: Complete configuration.
        evaluation: Options of the evaluation.
    """

    series: str
    x: float | None
    seed: int
    config: dict[str, Any]
    evaluation: dict[str, Any]

    @property
    def hash(self) -> str:
        """What identifies the run."""
        return digest(self.config)


class Experiment:
    """A table or a figure of the paper: the runs of each budget, and what the paper reports.

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
        if missing := _REQUIRED - set(fields):
            raise ValueError(f"{name}.yaml lacks the field {min(missing)!r}")
        if fields["runner"] not in RUNNERS:
            raise ValueError(f"{name}.yaml: runner must be one of {', '.join(RUNNERS)}, got {fields['runner']!r}")
        self.name, self.title, self.place = name, fields["title"], fields["place"]
        self.runner = RUNNERS[fields["runner"]]
        self.rows = [Row(*row) for row in fields["rows"]]
        self.series: dict[str, dict[str, Any]] = _expand(fields.get("series", {"": {}}))
        self.columns: list[str] = fields.get("columns", list(self.series))
        self.sweep: dict[str, Any] | None = fields.get("sweep")
        self.paper: dict[str, dict[str, list[float]]] = fields.get("paper", {})
        self.transposed: bool = fields.get("transposed", False)
        self.plot: list[str] | None = fields.get("plot")
        self._base, self._budgets = fields.get("base", {}), fields["budgets"]
        self.budgets = [budget for budget in BUDGETS if budget in self._budgets]

    def note(self, budget: str) -> str:
        """Describe a budget."""
        return str(self._budget(budget).get("note", ""))

    def cases(self, budget: str) -> list[Case]:
        """Return the runs of a budget, seed by seed: the first seed is complete before the second begins."""
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
                    config = self.runner.resolve(merge(self._base, series, own, special, at), seed)
                    cases.append(Case(name, x, seed, config, chosen.get("evaluate", {})))
        return cases

    def _budget(self, budget: str) -> dict[str, Any]:
        if budget not in self._budgets:
            raise ValueError(f"{self.name} has the budgets {', '.join(self._budgets)}, got {budget!r}")
        chosen: dict[str, Any] = self._budgets[budget]
        return chosen


def experiments_folder() -> Any:
    """Return the folder experiments of the current directory, if it has one, or else that of the package."""
    return Path("experiments") if Path("experiments").is_dir() else files("orthoconv.lab.paper") / "experiments"


def names() -> list[str]:
    """Return the names of all experiments, in the order of the paper."""
    paths = [path for path in experiments_folder().iterdir() if path.name.endswith(".yaml")]
    return [path.name.removesuffix(".yaml") for path in sorted(paths, key=_number)]


def load_experiment(name: str) -> Experiment:
    """Read the experiment called `name`."""
    path = experiments_folder() / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"the experiments are {', '.join(names())}; got {name!r}")
    try:
        return Experiment(name, tree_of(yaml.safe_load(path.read_text())))
    except (yaml.YAMLError, AttributeError, TypeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not an experiment: {error}") from error


def _number(path: Any) -> int:
    """Return the number that the file of an experiment begins with."""
    try:
        return int(path.read_text().removeprefix("#").split(".")[0])
    except ValueError as error:
        raise ValueError(f"{path} does not begin with its number, as in # 1. Title") from error


def _expand(series: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Repeat a series with {method} in its name for each registered convolution; one of the same name adds to it.

    >>> list(_expand({"A {method}": {}}))[:2]
    ['A aoc', 'A aol']
    >>> _expand({"{method}": {"model": {"conv": "{method}"}}, "aol": {"lr": 0.1}})["aol"]
    {'model': {'conv': 'aol'}, 'lr': 0.1}
    """
    expanded: dict[str, dict[str, Any]] = {}
    for name, config in series.items():
        for method in conv_methods() if _METHOD in name else [""]:
            filled = _fill(config or {}, method)
            column = name.replace(_METHOD, method)
            expanded[column] = merge(expanded.get(column, {}), filled)
    return expanded


def _fill(value: Any, method: str) -> Any:
    if isinstance(value, dict):
        return {k: _fill(v, method) for k, v in value.items()}
    return method if value == _METHOD else value


def merge(*parts: dict[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries; later values replace earlier ones.

    >>> merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = merge(merged[key], value) if both else value
    return merged


def _nested(paths: list[str], value: float) -> dict[str, Any]:
    """Put `value` at each of the dotted paths.

    >>> _nested(["a.b", "c"], 1)
    {'a': {'b': 1}, 'c': 1}
    """
    tree: dict[str, Any] = {}
    for path in paths:
        *outer, last = path.split(".")
        part: dict[str, Any] = {last: value}
        for key in reversed(outer):
            part = {key: part}
        tree = merge(tree, part)
    return tree
