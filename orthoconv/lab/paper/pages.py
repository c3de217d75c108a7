"""The pages of an experiment: its tables and pictures, and the runs behind them."""

__all__ = ["write_pages"]

from pathlib import Path
from typing import Any

from orthoconv.files import write_atomically
from orthoconv.lab import plots
from orthoconv.lab.pages import render
from orthoconv.lab.paper.experiment import Experiment
from orthoconv.lab.paper.records import Record, read_records
from orthoconv.lab.paper.tables import Table, made_runs, make_table, markdown


def write_pages(experiment: Experiment, folder: Path, *, smoke: bool = False) -> Path:
    """Write NAME.md and NAME.html from the records of a folder, and return the path of the latter.

    Arguments:
        experiment: The experiment.
        folder: Folder of the records.
        smoke: Whether to show the budget smoke alone, or all others.
    """
    records = read_records(folder)
    parts: list[dict[str, Any]] = []
    for budget in experiment.budgets:
        if smoke is not (budget == "smoke"):
            continue
        cases = experiment.cases(budget)
        made = made_runs(cases, experiment, records)
        table = make_table(experiment, budget, records)
        parts.append({
            "budget": budget, "note": experiment.note(budget), "table": table, "made": made, "wanted": len(cases),
            "plot": _plot(experiment, table, [record for _, record in made]) if made else "",
        })  # fmt: skip
    heading = f"# {experiment.title}\n\n{experiment.place}."
    text = [f"## Budget {p['budget']}: {p['note']}\n\n{markdown(p['table'])}" for p in parts]
    write_atomically(folder / f"{experiment.name}.md", ("\n\n".join([heading, *text]) + "\n").encode())
    path = folder / f"{experiment.name}.html"
    write_atomically(path, render("reproduce.html.j2", experiment=experiment, parts=parts).encode())
    return path


def _plot(experiment: Experiment, table: Table, records: list[Record]) -> str:
    if experiment.plot is not None:
        x, y = (next(row for row in table.rows if row.key == key) for key in experiment.plot)
        return plots.trade_off(table, x, y)
    layers = {name: values for record in records for name, values in record.get("ratios", {}).items()}
    return plots.ratios(layers) if layers else plots.experiment(experiment, table)
