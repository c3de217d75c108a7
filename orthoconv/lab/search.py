"""Trials of recipes and networks, chosen by certified accuracy on training images that were held out."""

__all__ = [
    "Trial",
    "best_first",
    "complete_trial",
    "finalist_record",
    "has_record",
    "load_trials",
    "run_trial",
    "trials_table",
]

import time
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]
from torch import nn

from orthoconv.certificates import certify
from orthoconv.data import Split, batches
from orthoconv.lab.configs import Training
from orthoconv.lab.locks import locked
from orthoconv.lab.paper.experiment import merge
from orthoconv.lab.paper.records import Record, append_record, read_records
from orthoconv.lab.parsing import tree_of
from orthoconv.lab.runs import Run
from orthoconv.lab.training import held_out_images, train_run
from orthoconv.nn import IsometryAverage
from orthoconv.train import TrainingError

_RADII = (36, 72, 108)  # over 255


class Trial(NamedTuple):
    """A configuration to try, and its name."""

    name: str
    training: Training


def load_trials(path: Path | None = None) -> list[Trial]:
    """Read the trials of a file, by default those of the package, in the order in which they are run.

    Arguments:
        path: File with `base`, a configuration, and `trials`: a name and what it changes in `base`, for each.
    """
    source = files("orthoconv.lab") / "trials.yaml" if path is None else path
    try:
        fields = tree_of(yaml.safe_load(source.read_text()))
        trials = [Trial(str(k), Training.of(merge(fields["base"], v or {}))) for k, v in fields["trials"].items()]
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not a list of trials: {error!r}") from error
    for k, trial in enumerate(trials):
        if same := [t.name for t in trials[:k] if t.training.hash == trial.training.hash]:
            raise ValueError(f"{source}: {trial.name!r} and {same[0]!r} are the same configuration")
    return trials


def has_record(trial: Trial, records: list[Record]) -> bool:
    """Return whether one of the records is that of a trial with this configuration."""
    trials = [record for record in records if record.get("experiment") == "search"]
    return any(Training.of(record["config"]).hash == trial.training.hash for record in trials)


def complete_trial(
    trial: Trial,
    results: Path,
    runs: Path,
    data_dir: Path | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> None:
    """Run a trial, unless there is a record of it, and append its record to search.jsonl.

    Arguments:
        trial: What to try.
        results: Folder of the records.
        runs: Folder with a folder for each run, named by the digest of its configuration.
        data_dir: Folder of the data set; by default its usual place.
        device: Device that computes.

    Raises:
        LockedError: If another process runs the same trial.
    """
    if has_record(trial, read_records(results)):
        return
    folder = runs / trial.training.hash
    with locked(folder):
        if has_record(trial, read_records(results)):  # another process has just made it
            return
        print(f"\nsearch: {trial.name}", flush=True)
        append_record(results / "search.jsonl", run_trial(trial, Run(folder, data_dir), data_dir, device))


def run_trial(
    trial: Trial,
    run: Run,
    data_dir: Path | None = None,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Record:
    """Train a trial to the end, from its checkpoint if it has one, and measure it on the images that were held out.

    The test images are not used.

    Arguments:
        trial: What to train; its `examples` say how many training images are not held out.
        run: Folder of the run.
        data_dir: Folder of the data set; by default its usual place.
        device: Device that computes.
    """
    training = trial.training
    figures: dict[str, Any] = {}
    try:
        if not run.weights_path.exists():
            train_run(run, training, data_dir, resume=True, device=device, held_out=True)
        held_out, started = held_out_images(run.load_data()[0], training.examples), time.perf_counter()
        model = run.load_model().to(device)
        figures = _with_mirror(model, training, held_out)
        figures["measuring_seconds"] = time.perf_counter() - started
    except TrainingError as error:  # the learning rate is too high, which is an answer
        figures = {"failed": str(error)}
    return _record("search", trial.name, training, run, figures)


def finalist_record(name: str, run: Run, device: torch.device = torch.device("cpu")) -> Record:  # noqa: B008
    """Measure a run on the test images: clean and certified accuracy, with and without the mirror image.

    Certificates count what rounding may do.

    Arguments:
        name: What to call it.
        run: Folder of a run of all training images, trained to the end.
        device: Device that computes; the record names it beside the machine of the training.
    """
    test, model, started = run.load_data()[1], run.load_model().to(device), time.perf_counter()
    figures = _with_mirror(model, run.training, test, (*_RADII, 255), rounding=True)
    figures["measuring_seconds"] = time.perf_counter() - started
    return {**_record("finalist", name, run.training, run, figures), "measured_on": str(device)}


def _record(kind: str, name: str, training: Training, run: Run, figures: dict[str, Any]) -> Record:
    epochs = run.metrics()
    cost = {key: sum(epoch.get(key, 0.0) for epoch in epochs) for key in ("seconds", "cpu_seconds")}
    last = {f"train_{key}": epochs[-1][key] for key in ("loss", "accuracy") if epochs}
    record: Record = {"experiment": kind, "series": name, "config": training.config, "hash": training.hash}
    record |= {"seed": training.recipe.seed, "hardware": run.config["hardware"], **cost, "epochs": epochs}
    return {**record, "metrics": {**figures, **last}}


def _with_mirror(model: nn.Module, training: Training, split: Split, *args: Any, **options: Any) -> dict[str, Any]:
    """Return the figures of the model, and those over the mirror image, which may be the same."""
    figures = _measure(model, split, *args, **options)
    average = IsometryAverage(model)
    return {**figures, "mirrored": figures if training.model.mirror else _measure(average, split, *args, **options)}


def _measure(model: nn.Module, split: Split, radii: tuple[int, ...] = _RADII, rounding: bool = False) -> dict[str, Any]:
    """Return clean and certified accuracy, in percent."""
    certificates = certify(model.eval(), batches(split, 500), [r / 255 for r in radii], rounding=rounding)
    shares = zip(radii, certificates.certified_accuracy.values(), strict=True)
    return {"clean": 100 * certificates.clean_accuracy, **{f"certified_{r}": 100 * share for r, share in shares}}


def best_first(records: list[Record]) -> list[Record]:
    """Return the records of trials, the one with the highest certified accuracy at 36/255 first."""
    trials = [record for record in records if record.get("experiment") == "search"]
    return sorted(trials, key=lambda record: -float(record["metrics"].get("certified_36", 0.0)))


def trials_table(records: list[Record]) -> str:
    """Return the table of all trials, the best first: figures of held-out images, and what each trial cost."""
    keys = ["clean", *(f"certified_{r}" for r in _RADII)]
    names = ["clean", *(f"{r}/255" for r in _RADII), *("mirrored", "36/255")]
    lines = [f"| trial | epochs | {' | '.join(names)} | minutes | CPU minutes |", "|" + "---|" * (len(names) + 4)]
    for record in best_first(records):
        metrics, recipe = record["metrics"], record["config"]["recipe"]
        mirrored = metrics.get("mirrored", {})
        values = [metrics.get(key) for key in keys] + [mirrored.get("clean"), mirrored.get("certified_36")]
        cells = ["failed" if value is None else f"{value:.2f}" for value in values]
        minutes = [f"{record[key] / 60:.1f}" for key in ("seconds", "cpu_seconds")]
        lines.append(f"| {' | '.join([record['series'], str(recipe['epochs']), *cells, *minutes])} |")
    return "\n".join(lines)
