"""`orthoconv rates`: choose the learning rate of each column of an experiment by accuracy on held-out images."""

__all__ = ["rates"]

import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from orthoconv.lab.configs import Training
from orthoconv.lab.machine import hardware, use_device
from orthoconv.lab.paper.experiment import load_experiment
from orthoconv.lab.paper.rates import best_rates, split, try_rate
from orthoconv.lab.paper.records import append_record, read_records

GRID = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def rates(
    name: str,
    grid: list[float] = list(GRID),  # noqa: B006
    examples: int = 10_000,
    epochs: int = 1,
    only: list[str] | None = None,
    results: Path = Path("results"),
    data_dir: Path | None = None,
    data: str | None = None,
    device: str = "auto",
) -> None:
    """Train each column of an experiment briefly with each learning rate, and choose by accuracy on held-out images.

    The paper chose by accuracy on the test set. Here the last 5,000 training images (a tenth, if there are fewer) are
    held out, and the test set is not used.

    Example: orthoconv rates kwlarge_provable --only [Cayley] --epochs 2

    Args:
        name: Experiment of networks to train.
        grid: Learning rates.
        examples: Training images to use, the first ones; 0 for all but the held-out ones.
        epochs: Passes over them; the learning rate rises and falls as in a whole run.
        only: Columns; by default all.
        results: Folder to which rates.jsonl is appended, and whose records are not run again.
        data_dir: Folder of the data set; by default its usual place.
        data: Data set; by default the experiment's.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    cases = load_experiment(name).cases("short")
    cases = [c for c in cases if c.x is None and c.seed == cases[0].seed and (only is None or c.series in only)]
    if not cases or "recipe" not in cases[0].config:
        raise ValueError(f"{name} has no columns{f' among {only}' if only else ''} that a learning rate is chosen for")
    records = [record for record in read_records(results) if record.get("experiment") == "rates"]
    done = {Training.of(record["config"]).hash for record in records}
    place = use_device(device)
    split_once = cache(split)  # read only if something is to be tried
    for case in cases:
        usual = Training.of({**case.config, "data": data or case.config["data"], "examples": examples})
        for lr in grid:
            tried = replace(usual, recipe=replace(usual.recipe, epochs=epochs, lr=lr))
            if tried.hash in done:
                continue
            splits, started = split_once(tried.data, data_dir, examples), time.perf_counter()
            figures = try_rate(tried, *splits, f"{case.series}, {lr:g}", place)
            record: dict[str, Any] = {"experiment": "rates", "of": name, "series": case.series, "config": tried.config}
            measured = {"hardware": hardware(place), "seconds": time.perf_counter() - started, "metrics": figures}
            record |= {"hash": tried.hash, "seed": tried.recipe.seed, **measured}
            append_record(results / "rates.jsonl", record)
            print(f"{case.series}, {lr:g}: {figures['accuracy']:.2%}", flush=True)
    for series, lr in best_rates(name, read_records(results)).items():
        print(f"best for {series}: {lr:g}")
