"""`orthoconv search`: try recipes and networks, and choose by certified accuracy on held-out images."""

__all__ = ["search"]

from pathlib import Path

import torch

from orthoconv.lab.machine import use_device
from orthoconv.lab.paper.records import append_record, read_records
from orthoconv.lab.runs import Run
from orthoconv.lab.search import complete_trial, finalist_record, load_trials, trials_table


def search(
    trials: Path | None = None,
    only: list[str] | None = None,
    results: Path = Path("results"),
    runs: Path = Path("runs/search"),
    data_dir: Path | None = None,
    run: bool = True,
    finalist: Path | None = None,
    device: str = "auto",
) -> None:
    """Train each trial that has no record, and measure it on training images that were held out.

    The test images are not used. A trial that was stopped continues from its checkpoint.

    Example: orthoconv search --run false

    Args:
        trials: File of trials; by default that of the package.
        only: Names of the trials to run; by default all.
        results: Folder to which search.jsonl is appended.
        runs: Folder for the runs themselves.
        data_dir: Folder of the data set; by default its usual place.
        run: Whether to run what is missing, or only to show what there is.
        finalist: Folder of a trained run to measure on the test images, once, instead of trying anything.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    place = use_device(device)
    if finalist is not None:
        _measure_finalist(Run(finalist, data_dir), results, place)
        return
    chosen = load_trials(trials)
    if unknown := [name for name in only or [] if name not in {trial.name for trial in chosen}]:
        raise ValueError(f"the trials are {', '.join(trial.name for trial in chosen)}; got {unknown[0]!r}")
    for trial in chosen if run else []:
        if only is None or trial.name in only:
            complete_trial(trial, results, runs, data_dir, place)
    print(trials_table(read_records(results)), flush=True)


def _measure_finalist(run: Run, results: Path, device: torch.device) -> None:
    """Measure a run on the test images, unless that was done, and append the figures to finalists.jsonl."""
    known = [record for record in read_records(results) if record.get("experiment") == "finalist"]
    if any(record["hash"] == run.training.hash for record in known):
        raise ValueError(f"{run.folder} was measured on the test images already; see {results / 'finalists.jsonl'}")
    record = finalist_record(run.folder.name, run, device)
    append_record(results / "finalists.jsonl", record)
    for name, figures in ((run.folder.name, record["metrics"]), ("mirrored", record["metrics"]["mirrored"])):
        shares = ", ".join(f"{k} {figures[k]:.2f}" for k in figures if k == "clean" or k.startswith("certified"))
        print(f"{name}: {shares}")
