"""Tables of an experiment: our figures, with their number and deviation, beside the paper's. From records alone."""

__all__ = ["Cell", "Table", "make_table", "markdown", "read_records", "records_of"]

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from orthoconv.lab.experiments import Case, Experiment, Row
from orthoconv.lab.kinds import metrics_of
from orthoconv.lab.runs import digest

Record = dict[str, Any]
Key = tuple[str, str]


class Cell(NamedTuple):
    """What we found, a figure for each seed, and what the paper reports: mean and deviation, or the mean alone."""

    ours: list[float]
    paper: list[float]

    def text(self, decimals: int) -> str:
        """Mean, deviation and number of ours."""
        if not self.ours:
            return "missing"
        mean = f"{statistics.fmean(self.ours):.{decimals}f}"
        n = len(self.ours)
        return mean if n == 1 else f"{mean} ± {statistics.stdev(self.ours):.{decimals}f} (n = {n})"

    def said(self, decimals: int) -> str:
        """Mean and deviation of the paper's."""
        return " ± ".join(f"{value:.{decimals}f}" for value in self.paper)


class Table(NamedTuple):
    """Rows, columns, and the cell of each pair."""

    rows: list[Row]
    columns: list[str]
    cells: dict[Key, Cell]


def read_records(folder: Path) -> list[Record]:
    """All records of a folder of results, file by file, each in the order in which they were appended."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for k, line in enumerate(path.read_text().splitlines(), 1):
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {k} is not a record: {error}") from error
    return found


def records_of(case: Case, experiment: Experiment, records: list[Record]) -> list[Record]:
    """The records of one run, whichever experiment it was made for; that with most images attacked is the last."""
    found = []
    for record in records:
        try:
            config = experiment.kind.resolve(*_arguments(record["config"]))
        except (KeyError, TypeError, ValueError):  # of another kind
            continue
        if digest(config) == case.hash and experiment.kind.done(record, case.evaluation):
            found.append(record)
    return sorted(found, key=lambda record: record.get("evaluation", {}).get("attacked", 0))


def _arguments(config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """What a complete configuration was resolved from: some fields have come since older records."""
    if "wasserstein" in config:
        inner = dict(config["wasserstein"])
        return inner, inner.pop("seed")
    return {k: v for k, v in config.items() if k != "bench"}, config.get("recipe", {}).get("seed", 0)


def make_table(experiment: Experiment, budget: str, records: list[Record]) -> Table:
    """The table of an experiment, of one record of each run."""
    ours: dict[Key, list[float]] = {}
    cases = experiment.cases(budget)
    for case in cases:
        for record in records_of(case, experiment, records)[-1:]:
            for column, figures in _by_column(case.series, metrics_of(record)).items():
                for key, value in figures.items():
                    ours.setdefault((_key(case.x, key), column), []).append(value)
    xs = list(dict.fromkeys(case.x for case in cases))
    rows = [Row(_key(x, r.key), _label(experiment, x, r.label), r.decimals) for x in xs for r in experiment.rows]
    cells = {
        (row.key, column): Cell(ours.get((row.key, column), []), experiment.paper.get(column, {}).get(row.key, []))
        for row in rows
        for column in experiment.columns
    }
    return Table(rows, experiment.columns, cells)


def _by_column(series: str, metrics: dict[str, Any]) -> dict[str, dict[str, float]]:
    return metrics if all(isinstance(v, dict) for v in metrics.values()) else {series: metrics}


def _key(x: float | None, key: str) -> str:
    return key if x is None else f"{x:g} {key}"


def _label(experiment: Experiment, x: float | None, label: str) -> str:
    return label if x is None or experiment.sweep is None else f"{experiment.sweep['name']} = {x:g}, {label}"


def markdown(table: Table) -> str:
    """The table as text: a line of ours and, where it has figures, one of the paper's for each row."""
    lines = [f"| | {' | '.join(table.columns)} |", f"|---|{'---|' * len(table.columns)}"]
    for row in table.rows:
        cells = [table.cells[row.key, column] for column in table.columns]
        lines.append(f"| {row.label} | {' | '.join(c.text(row.decimals) for c in cells)} |")
        if any(c.paper for c in cells):
            lines.append(f"| {row.label}, paper | {' | '.join(c.said(row.decimals) for c in cells)} |")
    return "\n".join(lines)
