"""Tables of an experiment, made from records alone: our figures beside the paper's."""

__all__ = ["Cell", "Table", "made_runs", "make_table", "markdown", "records_of", "resolved"]

import statistics
from typing import Any, NamedTuple

from orthoconv.lab.configs import digest
from orthoconv.lab.paper.experiment import Case, Experiment, Row
from orthoconv.lab.paper.records import Record, metrics_of
from orthoconv.lab.paper.runners import Runner

Key = tuple[str, str]


class Cell(NamedTuple):
    """The figures of one cell of a table.

    Attributes:
        ours: Our figure for each seed.
        paper: The paper's mean and deviation, or its mean alone.
        made: Whether there is a record of the run, even if it lacks this figure: blocks have no singular values.
    """

    ours: list[float]
    paper: list[float]
    made: bool = False

    def our_text(self, decimals: int) -> str:
        """Return the mean, the deviation and the number of our figures."""
        if not self.ours:
            return "none" if self.made else "missing"
        mean = f"{statistics.fmean(self.ours):.{decimals}f}"
        n = len(self.ours)
        return mean if n == 1 else f"{mean} ± {statistics.stdev(self.ours):.{decimals}f} (n = {n})"

    def paper_text(self, decimals: int) -> str:
        """Return the mean and the deviation that the paper reports."""
        return " ± ".join(f"{value:.{decimals}f}" for value in self.paper)


class Table(NamedTuple):
    """Rows, columns, and the cell of each pair; if it is transposed, text has a line for each column."""

    rows: list[Row]
    columns: list[str]
    cells: dict[Key, Cell]
    transposed: bool = False

    @property
    def empty(self) -> list[str]:
        """Columns without any figure of ours."""
        return [c for c in self.columns if not any(self.cells[row.key, c].ours for row in self.rows)]


def records_of(case: Case, experiment: Experiment, records: list[Record]) -> list[Record]:
    """Return the records of a run, of any experiment; the last one has the most images attacked.

    A record belongs to the run that its own configuration describes. The digest that it stores is not used.
    """
    return _done(case, experiment, _by_digest(experiment, records))


def _by_digest(experiment: Experiment, records: list[Record]) -> dict[str, list[Record]]:
    """Sort records by the digest of their complete configuration."""
    found: dict[str, list[Record]] = {}
    for record in records:
        try:
            config = resolved(record["config"], experiment.runner)
        except (KeyError, TypeError, ValueError):  # the record of another runner
            continue
        found.setdefault(digest(config), []).append(record)
    return found


def _done(case: Case, experiment: Experiment, found: dict[str, list[Record]]) -> list[Record]:
    """Return the records of a run that have what its evaluation asks for."""
    matching = [r for r in found.get(case.hash, []) if experiment.runner.is_done(r, case.evaluation)]
    return sorted(matching, key=lambda record: record.get("evaluation", {}).get("attacked", 0))


def made_runs(cases: list[Case], experiment: Experiment, records: list[Record]) -> list[tuple[Case, Record]]:
    """Return those runs that have a record, each with the last of `records_of`."""
    found = _by_digest(experiment, records)
    return [(case, done[-1]) for case in cases if (done := _done(case, experiment, found))]


def resolved(config: dict[str, Any], runner: Runner) -> dict[str, Any]:
    """Complete the configuration of a record: older records lack fields that were added later."""
    if "wasserstein" in config:
        inner = dict(config["wasserstein"])
        return runner.resolve(inner, inner.pop("seed"))
    known = {k: v for k, v in config.items() if k != "bench"}
    return runner.resolve(known, config.get("recipe", {}).get("seed", 0))


def make_table(experiment: Experiment, budget: str, records: list[Record]) -> Table:
    """Make the table of an experiment from one record of each run."""
    ours: dict[Key, list[float]] = {}
    made: set[tuple[float | None, str]] = set()
    cases = experiment.cases(budget)
    for case, record in made_runs(cases, experiment, records):
        made.add((case.x, case.series))
        for column, figures in _by_column(case.series, metrics_of(record)).items():
            for key, value in figures.items():
                ours.setdefault((_key(case.x, key), column), []).append(value)
    xs = list(dict.fromkeys(case.x for case in cases))
    rows = [(x, Row(_key(x, r.key), _label(experiment, x, r.label), r.decimals)) for x in xs for r in experiment.rows]
    cells = {
        (row.key, c): Cell(ours.get((row.key, c), []), experiment.paper.get(c, {}).get(row.key, []), (x, c) in made)
        for x, row in rows
        for c in experiment.columns
    }
    return Table([row for _, row in rows], experiment.columns, cells, experiment.transposed)


def _by_column(series: str, metrics: dict[str, Any]) -> dict[str, dict[str, float]]:
    return metrics if all(isinstance(v, dict) for v in metrics.values()) else {series: metrics}


def _key(x: float | None, key: str) -> str:
    return key if x is None else f"{x:g} {key}"


def _label(experiment: Experiment, x: float | None, label: str) -> str:
    return label if x is None or experiment.sweep is None else f"{experiment.sweep['name']} = {x:g}, {label}"


def markdown(table: Table) -> str:
    """Return the table as text: for each row a line of ours and, if the paper has figures, one of the paper's."""
    if table.transposed:
        head = [f"| | {' | '.join(row.label for row in table.rows)} |", f"|---|{'---|' * len(table.rows)}"]
        texts = {c: [table.cells[row.key, c].our_text(row.decimals) for row in table.rows] for c in table.columns}
        return "\n".join([*head, *(f"| {column} | {' | '.join(text)} |" for column, text in texts.items())])
    lines = [f"| | {' | '.join(table.columns)} |", f"|---|{'---|' * len(table.columns)}"]
    for row in table.rows:
        cells = [table.cells[row.key, column] for column in table.columns]
        lines.append(f"| {row.label} | {' | '.join(c.our_text(row.decimals) for c in cells)} |")
        if any(c.paper for c in cells):
            lines.append(f"| {row.label}, paper | {' | '.join(c.paper_text(row.decimals) for c in cells)} |")
    return "\n".join(lines)
