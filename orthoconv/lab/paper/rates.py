"""Learning rates, chosen by accuracy on held-out training images."""

__all__ = ["best_rates", "split", "try_rate"]

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from orthoconv import models
from orthoconv.certificates import certify
from orthoconv.data import Split, batches, load
from orthoconv.lab.configs import Training
from orthoconv.lab.paper.records import Record
from orthoconv.lab.progress import download_bar, quiet_bar
from orthoconv.models.trained import build_arguments
from orthoconv.train import TrainingError, fit

_HELD_OUT = 5000


def best_rates(name: str, records: list[Record]) -> dict[str, float]:
    """Return the rate with the best accuracy on held-out images, for each column, among its longest trials."""
    trials: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for record in records:
        if record.get("experiment") == "rates" and record["of"] == name and "loss" in record["metrics"]:
            recipe = record["config"]["recipe"]
            length = recipe["epochs"] * (record["config"]["examples"] or 1_000_000)
            trial = (record["metrics"]["accuracy"], recipe["lr"])
            trials.setdefault(record["series"], {}).setdefault(length, []).append(trial)
    return {series: max(lengths[max(lengths)])[1] for series, lengths in trials.items()}


def split(data: str, data_dir: Path | None, examples: int) -> tuple[Split, Split]:
    """Return the training images without the last 5,000 (a tenth, if there are fewer), and those."""
    images, labels = load(data, data_dir, download_bar())[0]
    kept = len(labels) - min(_HELD_OUT, len(labels) // 10)
    n = min(examples or kept, kept)
    return Split(images[:n], labels[:n]), Split(images[kept:], labels[kept:])


def try_rate(config: Training, training: Split, held_out: Split, name: str, device: torch.device) -> dict[str, float]:
    """Train a network, and return its accuracy on held-out images and the loss of the last epoch.

    Arguments:
        config: What to train, with the learning rate to try.
        training: Images to train on.
        held_out: Images to measure accuracy on.
        name: Label of the progress bar.
        device: Device that computes.
    """
    recipe = config.recipe
    torch.manual_seed(recipe.seed)
    network = models.build(**build_arguments(asdict(config.model), training)).to(device)
    steps = recipe.epochs * (len(training.labels) // recipe.batch_size)
    with tempfile.TemporaryDirectory() as folder, quiet_bar(name, steps) as bar:
        try:
            update = partial(_advance, bar)
            *_, last = fit(network, training, recipe, Path(folder) / "checkpoint", on_step=update)
        except TrainingError:  # the rate is too high, which is an answer
            return {"accuracy": 0.0}
    certificates = certify(network, batches(held_out, 500), rounding=False)
    certified = certificates.certified_accuracy[36 / 255]
    return {"accuracy": certificates.clean_accuracy, "certified": certified, "loss": last["loss"]}


def _advance(bar: Any, figures: dict[str, Any]) -> None:
    bar.update(figures["step"] - bar.n)
