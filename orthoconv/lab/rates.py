"""`orthoconv rates`: the learning rate of each column of an experiment, chosen as the paper did."""

__all__ = ["best_rates", "rates"]

import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from orthoconv.certify import certify
from orthoconv.data import Split, batches, load
from orthoconv.lab.experiments import load_experiment
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import ModelSpec, append_record, digest, hardware
from orthoconv.lab.tables import read_records
from orthoconv.train import Recipe, TrainingError, fit

GRID = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_HELD_OUT = 5000


def rates(
    name: str,
    grid: list[float] = list(GRID),  # noqa: B006
    examples: int = 10_000,
    epochs: int = 1,
    only: list[str] | None = None,
    results: Path = Path("results"),
    data_dir: Path | None = None,
    data: str | None = None,
) -> None:
    """Train each column of an experiment briefly with each learning rate, and choose by accuracy on held-out images.

    The paper chose by accuracy on the test set; this does not look at it, but at the last 5,000 training images (a
    tenth, if there are fewer), which are not trained on here.

    Args:
        name: Experiment of networks to train.
        grid: Learning rates.
        examples: Training images to use, the first ones; 0 for all but the held-out ones.
        epochs: Passes over them; the learning rate rises and falls as in a whole run.
        only: Columns; by default all.
        results: Folder to which rates.jsonl is appended, and whose records are not run again.
        data_dir: Where the data set is; by default where it usually is.
        data: Another data set than the experiment's.
    """
    experiment = load_experiment(name)
    cases = [case for case in experiment.cases("short") if case.x is None and (only is None or case.series in only)]
    if not cases or "recipe" not in cases[0].config:
        raise ValueError(f"{name} has no columns{f' among {only}' if only else ''} that a learning rate is chosen for")
    done = {digest(record["config"]) for record in read_records(results)}
    split = cache(_split)  # read once, and only if something is to be tried
    for case in cases:
        source = data or case.config["data"]
        model = ModelSpec(**case.config["model"])
        recipe = replace(Recipe(**case.config["recipe"]), epochs=epochs)
        for lr in grid:
            tried = replace(recipe, lr=lr)
            config = {"data": source, "examples": examples, "model": asdict(model), "recipe": asdict(tried)}
            if digest(config) in done:
                continue
            training, held_out = split(source, data_dir, examples)
            started = time.perf_counter()
            figures = _try(model, training, held_out, tried, f"{case.series}, {lr:g}")
            about = {"experiment": "rates", "of": name, "series": case.series, "config": config, "hash": digest(config)}
            seconds = time.perf_counter() - started
            record = {**about, "seed": recipe.seed, "hardware": hardware(), "seconds": seconds, "metrics": figures}
            append_record(results / "rates.jsonl", record)
            print(f"{case.series}, {lr:g}: {figures['accuracy']:.2%}", flush=True)
    for series, lr in best_rates(name, read_records(results)).items():
        print(f"best for {series}: {lr:g}")


def best_rates(name: str, records: list[dict[str, Any]]) -> dict[str, float]:
    """The learning rate with the best accuracy on held-out images, for each column, in the longest of its trials."""
    trials: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for record in records:
        if record.get("experiment") == "rates" and record["of"] == name and "loss" in record["metrics"]:
            recipe = record["config"]["recipe"]
            length = recipe["epochs"] * (record["config"]["examples"] or 1_000_000)
            found = (record["metrics"]["accuracy"], recipe["lr"])
            trials.setdefault(record["series"], {}).setdefault(length, []).append(found)
    return {series: max(lengths[max(lengths)])[1] for series, lengths in trials.items()}


def _split(source: str, data_dir: Path | None, examples: int) -> tuple[Split, Split]:
    """Training images without the last ones, and the last ones."""
    images, labels = load(source, data_dir, download_bar())[0]
    kept = len(labels) - min(_HELD_OUT, len(labels) // 10)
    n = min(examples or kept, kept)
    return Split(images[:n], labels[:n]), Split(images[kept:], labels[kept:])


def _try(model: ModelSpec, training: Split, held_out: Split, recipe: Recipe, name: str) -> dict[str, float]:
    """Clean and certified accuracy on held-out images after training, and the loss of the last epoch."""
    torch.manual_seed(recipe.seed)
    network = model.build(training)
    steps = recipe.epochs * (len(training.labels) // recipe.batch_size)
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=steps, desc=name, leave=False, disable=not sys.stderr.isatty()) as bar,
    ):

        def on_step(figures: dict[str, Any]) -> None:
            bar.update()

        try:
            *_, last = fit(network, training, recipe, Path(folder) / "checkpoint", on_step=on_step)
        except TrainingError:  # too high a rate, which is an answer
            return {"accuracy": 0.0}
    found = certify(network, batches(held_out, 500), rounding=False)
    return {"accuracy": found.clean_accuracy, "certified": found.certified_accuracy[36 / 255], "loss": last["loss"]}
