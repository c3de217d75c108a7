"""A run of an experiment that has no record yet: run it, and append its record."""

__all__ = ["complete_case", "title_of"]

from pathlib import Path

from orthoconv.lab.locks import locked
from orthoconv.lab.paper.experiment import Case, Experiment
from orthoconv.lab.paper.records import append_record, read_records
from orthoconv.lab.paper.runners import Context
from orthoconv.lab.paper.tables import records_of


def complete_case(experiment: Experiment, budget: str, case: Case, folder: Path, context: Context) -> None:
    """Run a case, unless there is a record of it.

    Arguments:
        experiment: Experiment of the case.
        budget: Budget of the case.
        case: What to run.
        folder: Folder of the records.
        context: Where the run reads its data and writes its files.

    Raises:
        LockedError: If another process runs the same case.
    """
    if records_of(case, experiment, read_records(folder)):
        return
    with locked(context.runs / case.hash):
        if records_of(case, experiment, read_records(folder)):  # another process has just made it
            return
        print(f"\n{title_of(experiment, case)}", flush=True)
        record = experiment.runner.execute(case.config, context)
        about = {"experiment": experiment.name, "budget": budget, "series": case.series, "x": case.x}
        append_record(folder / f"{experiment.name}.jsonl", {**about, **record, "hash": case.hash, "seed": case.seed})


def title_of(experiment: Experiment, case: Case) -> str:
    """Return the name of a case: experiment, column, place in the sweep, seed."""
    at = "" if case.x is None or experiment.sweep is None else f", {experiment.sweep['name']} = {case.x:g}"
    return f"{experiment.name}: {case.series or experiment.title}{at}, seed {case.seed}"
