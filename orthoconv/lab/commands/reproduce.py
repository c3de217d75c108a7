"""`orthoconv reproduce`: run a table or a figure of the paper again."""

__all__ = ["reproduce"]

from pathlib import Path
from typing import Literal

from orthoconv.lab.paper.experiment import Case, Experiment, load_experiment, names
from orthoconv.lab.paper.pages import write_pages
from orthoconv.lab.paper.records import append_record, read_records
from orthoconv.lab.paper.runners import Context
from orthoconv.lab.paper.tables import make_table, markdown, records_of


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
    """Run the missing parts of a table or figure of the paper, and show our figures beside the paper's.

    Args:
        name: Name of an experiment, or all.
        budget: smoke (every column as a one-minute test on enlarged digits, whose figures mean nothing), short (hours
            on two cores), or paper (the paper's number of epochs and seeds).
        only: Columns to run; by default all.
        seeds: Seeds to run; by default all of the budget.
        results: Folder of the records, to which NAME.jsonl, NAME.md and NAME.html are written; by default results, and
            for smoke runs/smoke.
        runs: Folder for the runs themselves; a run that was stopped continues.
        data_dir: Folder of the data set; by default its usual place.
        run: Whether to run what is missing, or only to show what there is.
    """
    folder = results or Path("runs/smoke" if budget == "smoke" else "results")
    for one in names() if name == "all" else [name]:
        experiment = load_experiment(one)
        if unknown := [column for column in only or [] if column not in experiment.series]:
            raise ValueError(f"{one} has the columns {', '.join(experiment.series)}; got {unknown[0]!r}")
        if run:
            for case in experiment.cases(budget):
                if (only is None or case.series in only) and (seeds is None or case.seed in seeds):
                    _complete(experiment, budget, case, folder, Context(runs, data_dir, case.evaluation))
        print(f"\n{experiment.title} ({experiment.place}), {budget}: {experiment.note(budget)}\n")
        print(markdown(make_table(experiment, budget, read_records(folder))))
        print(f"\n{folder / one}.jsonl, .md\n{write_pages(experiment, folder, smoke=budget == 'smoke')}", flush=True)


def _complete(experiment: Experiment, budget: str, case: Case, folder: Path, context: Context) -> None:
    """Run a case, unless there is a record of it."""
    if records_of(case, experiment, read_records(folder)):
        return
    at = "" if case.x is None or experiment.sweep is None else f", {experiment.sweep['name']} = {case.x:g}"
    print(f"\n{experiment.name}: {case.series or experiment.title}{at}, seed {case.seed}", flush=True)
    record = experiment.runner.execute(case.config, context)
    about = {"experiment": experiment.name, "budget": budget, "series": case.series, "x": case.x}
    append_record(folder / f"{experiment.name}.jsonl", {**about, **record, "hash": case.hash, "seed": case.seed})
