"""`orthoconv reproduce`: a table or a figure of the paper, run again."""

__all__ = ["render", "reproduce", "table_text"]

from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment

from orthoconv.lab import plots
from orthoconv.lab.experiments import BUDGETS, Case, Experiment, load_experiment, names
from orthoconv.lab.kinds import Context
from orthoconv.lab.runs import append_record
from orthoconv.lab.tables import Table, make_table, markdown, read_records, records_of


def reproduce(
    name: str,
    budget: Literal["smoke", "short", "paper"] = "smoke",
    only: list[str] | None = None,
    seeds: list[int] | None = None,
    results: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    data_dir: Path | None = None,
    run: bool = True,
) -> None:
    """Run what is missing of a table or figure of the paper, and show ours beside the paper's.

    Args:
        name: Name of a file in experiments, or all.
        budget: smoke (minutes for the whole list, on enlarged digits: shows that it works, and nothing else), short
            (hours on two cores), or paper (its own number of epochs and seeds).
        only: Columns to run; by default all.
        seeds: Seeds to run; by default all that the budget asks for.
        results: Folder of the records, to which NAME.jsonl, NAME.md and NAME.html are written; by default results, and
            for smoke runs/smoke.
        runs: Folder for the runs themselves, which go on where they were stopped.
        data_dir: Where the data set is; by default where it usually is.
        run: Whether to run what is missing, or only to show what there is.
    """
    folder = results or Path("runs/smoke" if budget == "smoke" else "results")
    for one in names() if name == "all" else [name]:
        experiment = load_experiment(one)
        _require_columns(experiment, only)
        if run:
            for case in experiment.cases(budget):
                if (only is None or case.series in only) and (seeds is None or case.seed in seeds):
                    _complete(experiment, budget, case, folder, Context(runs, data_dir, case.evaluation))
        print(f"\n{experiment.title} ({experiment.place}), {budget}: {experiment.note(budget)}\n")
        print(table_text(experiment, budget, read_records(folder)))
        print(f"\n{folder / one}.jsonl, .md\n{render(experiment, folder, smoke=budget == 'smoke')}", flush=True)


def _require_columns(experiment: Experiment, only: list[str] | None) -> None:
    if unknown := [column for column in only or [] if column not in experiment.series]:
        raise ValueError(f"{experiment.name} has the columns {', '.join(experiment.series)}; got {unknown[0]!r}")


def _complete(experiment: Experiment, budget: str, case: Case, folder: Path, context: Context) -> None:
    """Run a case, unless there is a record of it."""
    if records_of(case, experiment, read_records(folder)):
        return
    at = "" if case.x is None or experiment.sweep is None else f", {experiment.sweep['name']} = {case.x:g}"
    print(f"\n{experiment.name}: {case.series or experiment.title}{at}, seed {case.seed}", flush=True)
    record = experiment.kind.execute(case.config, context)
    about = {"experiment": experiment.name, "budget": budget, "series": case.series, "x": case.x}
    append_record(folder / f"{experiment.name}.jsonl", {**about, **record, "hash": case.hash, "seed": case.seed})


def table_text(experiment: Experiment, budget: str, records: list[dict[str, Any]]) -> str:
    """The table of one budget, as text."""
    return markdown(make_table(experiment, budget, records))


def _plot(experiment: Experiment, table: Table, records: list[dict[str, Any]]) -> str:
    layers = {name: values for record in records for name, values in record.get("ratios", {}).items()}
    return plots.ratios(layers) if layers else plots.experiment(experiment, table)


def render(experiment: Experiment, folder: Path, *, smoke: bool = False) -> Path:
    """Write NAME.md and NAME.html from the records of a folder: the table of each budget, or that of smoke alone."""
    records = read_records(folder)
    parts: list[dict[str, Any]] = []
    for budget in BUDGETS[:1] if smoke else BUDGETS[1:]:
        cases = experiment.cases(budget)
        made = [(case, found[-1]) for case in cases if (found := records_of(case, experiment, records))]
        table = make_table(experiment, budget, records)
        parts.append({
            "budget": budget, "note": experiment.note(budget), "table": table, "made": made, "wanted": len(cases),
            "plot": _plot(experiment, table, [record for _, record in made]) if made else "",
        })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    heading = f"# {experiment.title}\n\n{experiment.place}."
    text = [f"## {p['budget']}: {p['note']}\n\n{markdown(p['table'])}" for p in parts]
    (folder / f"{experiment.name}.md").write_text("\n\n".join([heading, *text]) + "\n")
    template = files("orthoconv.lab").joinpath("reproduce.html.j2").read_text()
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    path = folder / f"{experiment.name}.html"
    path.write_text(page.render(experiment=experiment, parts=parts))
    return path
