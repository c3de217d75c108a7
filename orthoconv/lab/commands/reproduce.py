"""`orthoconv reproduce`: run a table or a figure of the paper again."""

__all__ = ["reproduce"]

from pathlib import Path
from typing import Literal

from orthoconv.lab.machine import use_device
from orthoconv.lab.paper.completion import complete_case
from orthoconv.lab.paper.experiment import load_experiment, names
from orthoconv.lab.paper.pages import write_pages
from orthoconv.lab.paper.records import read_records
from orthoconv.lab.paper.runners import Context
from orthoconv.lab.paper.tables import make_table, markdown


def reproduce(
    name: str,
    budget: Literal["smoke", "digits", "brief", "short", "paper"] = "smoke",
    only: list[str] | None = None,
    seeds: list[int] | None = None,
    results: Path | None = None,
    runs: Path = Path("runs/reproduce"),
    data_dir: Path | None = None,
    run: bool = True,
    device: str = "auto",
) -> None:
    """Run the missing parts of a table or figure of the paper, and show our figures beside the paper's.

    Example: orthoconv reproduce kwlarge_provable --budget smoke

    Args:
        name: Name of an experiment, or all.
        budget: smoke (every column as a one-minute test on enlarged digits, whose figures mean nothing), digits and
            brief (of `methods` alone: four epochs of enlarged digits, two of CIFAR-10), short (hours on two cores), or
            paper (the paper's epochs and seeds).
        only: Columns to run; by default all.
        seeds: Seeds to run; by default all of the budget.
        results: Folder of the records, to which NAME.jsonl, NAME.md and NAME.html are written; by default results, and
            for smoke runs/smoke.
        runs: Folder for the runs themselves; a run that was stopped continues.
        data_dir: Folder of the data set; by default its usual place.
        run: Whether to run what is missing, or only to show what there is.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    place = use_device(device)
    folder = results or Path("runs/smoke" if budget == "smoke" else "results")
    for one in names() if name == "all" else [name]:
        experiment = load_experiment(one)
        if unknown := [column for column in only or [] if column not in experiment.series]:
            raise ValueError(f"{one} has the columns {', '.join(experiment.series)}; got {unknown[0]!r}")
        if run:
            for case in experiment.cases(budget):
                if (only is None or case.series in only) and (seeds is None or case.seed in seeds):
                    context = Context(runs, data_dir, case.evaluation, place)
                    complete_case(experiment, budget, case, folder, context)
        print(f"\n{experiment.title} ({experiment.place}), {budget}: {experiment.note(budget)}\n")
        print(markdown(make_table(experiment, budget, read_records(folder))))
        print(f"\n{folder / one}.jsonl, .md\n{write_pages(experiment, folder, smoke=budget == 'smoke')}", flush=True)
