"""Training a run: its folder, its progress bar, and a certificate after each epoch."""

__all__ = ["held_out_images", "join", "parts_of", "train_run"]

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from orthoconv import budget, models
from orthoconv.certificates import certify
from orthoconv.data import OWN, DataError, Split, batches, load
from orthoconv.files import write_atomically
from orthoconv.lab.configs import Training
from orthoconv.lab.locks import locked
from orthoconv.lab.logging import Logger
from orthoconv.lab.machine import hardware
from orthoconv.lab.opening import open_model
from orthoconv.lab.progress import download_bar
from orthoconv.lab.resuming import parts_of, require_new, require_same, require_same_mean
from orthoconv.lab.runs import Run
from orthoconv.lab.side_by_side import run_side_by_side
from orthoconv.models.trained import build_arguments, run_arguments
from orthoconv.models.words import divisor_of
from orthoconv.nn import Ensemble, IsometryAverage
from orthoconv.train import CheckpointError, Recipe, TrainingError, fit, load_weights, save_weights
from orthoconv.train.distributed import World, finish, start, together, total
from orthoconv.train.loop import require_resumable
from orthoconv.train.sources import require_batch_size

_MOST_CLASSES = 100  # whose accuracy is written after each epoch
_LARGE = 128**2  # pixels
_EXPECTED = (CheckpointError, DataError, TrainingError, ImportError, OSError, ValueError, TypeError)  # of a member


def train_run(
    run: Run,
    training: Training,
    data_dir: Path | None = None,
    *,
    resume: bool = False,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    held_out: bool = False,
    loggers: Sequence[Logger] = (),
    side_by_side: bool = False,
) -> None:
    """Train a network, certify it after each epoch, and write everything to the folder of the run.

    Arguments:
        run: Folder to write to.
        training: What to train, on what and how.
        data_dir: Folder of the data set; by default its usual place.
        resume: Continue from the last checkpoint of the folder, if there is one.
        held_out: Certify on the training images that `training.examples` leaves out. The test images are not used.
        device: Device that computes.
        loggers: What else gets the figures of each step and epoch; in one of several processes, none.
        side_by_side: Train the members of a mean at the same time, each in a process of its own with its share of the
            threads, if a CPU computes and there are no loggers. That takes less time than one after the other with all
            threads. The processes know the methods of this package and of entry points.
    """
    if parts_of(training) == [training]:
        _train_one(run, training, data_dir, resume, device, held_out, loggers)
    else:
        side_by_side = side_by_side and device.type == "cpu" and not loggers
        _train_parts(run, training, data_dir, resume, device, held_out, loggers, side_by_side)


def _train_parts(
    run: Run, training: Training, data_dir: Path | None, resume: bool, device: torch.device, held_out: bool,
    loggers: Sequence[Logger], side_by_side: bool,
) -> None:  # fmt: skip
    """Train the parts of a network, each in a folder of its own, and write the whole."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes train one network; train each member by itself, in the folder member0, ...")
    parts = parts_of(training)
    runs = [Run(run.folder / f"member{k}") for k in range(len(parts))]
    if resume:
        require_same_mean(run, runs, training)
    else:
        require_new(run, *runs)
    split, test = load(training.data, data_dir, download_bar(), **training.reading)
    images = _fingerprints(training, split, test)
    if held_out:
        test = held_out_images(split, training.examples)
    split, world = split.first(training.examples), World(0, 1, device)
    _require_fitting(parts[0], split, world, data_dir)
    for part in parts:
        network = models.build(**_config(part, split, data_dir)["network"])  # refuses what cannot be built
        if part.start is not None:
            _start_from(part.start, network)
    for part_run, part in zip(runs if resume else (), parts, strict=resume):
        _require_resumable(part_run, part, split, images)
    with contextlib.ExitStack() as locks:
        for part_run in runs:
            locks.enter_context(locked(part_run.folder))
        _write_config(run, _config(training, split, data_dir) | images, device)  # for --resume
        calls = [(r, part, data_dir, resume, device, held_out, loggers) for r, part in zip(runs, parts, strict=True)]
        _train_members(calls, side_by_side)
        network = join(run, runs).to(device)
    _join_metrics(run, runs, _test_figures(network, test, world), "held out" if held_out else "test")
    print(f"weights: {run.weights_path}")


def _train_members(calls: Sequence[tuple[Any, ...]], side_by_side: bool) -> None:
    """Call `_train_one` with the arguments of each member."""
    threads = torch.get_num_threads() // len(calls)
    if side_by_side and threads and len(calls) > 1:
        logs = [call[0].folder / "log.txt" for call in calls]
        print(f"{len(calls)} members side by side; this is member0, and {logs[1]} has what member1 prints", flush=True)
        run_side_by_side(_train_one, calls, logs, threads, expected=_EXPECTED)
        return
    for call in calls:
        print(f"{call[0].folder.name}: seed {call[1].recipe.seed}", flush=True)
        _train_one(*call)


def join(run: Run, runs: Sequence[Run]) -> nn.Sequential:
    """Write the weights of a network that is the mean of others, as its configuration says, and return it.

    Arguments:
        run: Folder with the configuration of the whole.
        runs: Folders of the members.
    """
    network = models.build(**run_arguments(run.folder))
    for path in (run.initial_path, run.weights_path):
        for one, part_run in zip(_single_networks(network), runs, strict=True):
            load_weights(part_run.folder / path.name, one)
        save_weights(path, network, run.config)
    return network


def _single_networks(network: nn.Sequential) -> list[nn.Module]:
    """Return the networks that were trained by themselves, of which `build` has made the whole."""
    inner = network[0].f if isinstance(network[0], IsometryAverage) else network
    inner = inner[0] if isinstance(inner, nn.Sequential) and isinstance(inner[0], Ensemble) else inner
    return list(inner.members) if isinstance(inner, Ensemble) else [inner]


def _join_metrics(run: Run, runs: Sequence[Run], figures: dict[str, Any], label: str) -> None:
    """Write the epochs of all members, one after the other, and then the figures of the whole."""
    joined: list[dict[str, Any]] = []
    for k, part in enumerate(runs):
        before = {key: joined[-1][key] if joined else 0 for key in ("epoch", "step")}
        joined += [{**m, "member": k, **{key: m[key] + n for key, n in before.items()}} for m in part.metrics()]
    last = [part.metrics()[-1] for part in runs]
    means = {key: sum(m[key] for m in last) / len(last) for key in ("loss", "accuracy", "lr")}
    whole = {**joined[-1], **means, "step": joined[-1]["step"] + 1, "seconds": 0.0, "cpu_seconds": 0.0, **figures}
    whole.pop("member")
    text = "".join(json.dumps(m) + "\n" for m in [*joined, whole])
    write_atomically(run.metrics_path, text.encode())
    print(_line(whole, label), flush=True)


def _train_one(
    run: Run, training: Training, data_dir: Path | None, resume: bool, device: torch.device, held_out: bool,
    loggers: Sequence[Logger],
) -> None:  # fmt: skip
    """Train one network."""
    if resume:
        require_same(run, training)
    else:
        require_new(run)
    world = start(device)
    split, test = load(training.data, data_dir, download_bar(), **training.reading)
    images = _fingerprints(training, split, test)
    if held_out:
        test = held_out_images(split, training.examples)
    split = split.first(training.examples)
    _require_fitting(training, split, world, data_dir)
    config = _config(training, split, data_dir) | images
    if resume:
        _require_resumable(run, training, split, images)
    torch.manual_seed(training.recipe.seed)
    network = models.build(**config["network"])
    if training.start is not None:
        _start_from(training.start, network)
    network = network.to(device)
    if world.rank == 0:
        _write_config(run, config, device, world.size)
        if not (resume and run.initial_path.exists()):
            save_weights(run.initial_path, network, config)
    with together(world, run.checkpoint_path):
        label = "held out" if held_out else "test"
        _fit(network, split, test, training.recipe, run, resume, world, label, loggers)
        finish(world)
    if world.rank == 0:
        save_weights(run.weights_path, network, {**config, "metrics": run.metrics()[-1:]})
        print(f"weights: {run.weights_path}")


def _start_from(source: str, network: nn.Sequential) -> None:
    """Give a network the weights of another one: folder, file or name, and #k behind it for one of a mean."""
    path, mark, number = source.rpartition("#")
    members = _single_networks(open_model(path if mark else source))
    if mark and not (number.isdecimal() and int(number) < len(members)):
        raise ValueError(f"start must name one of {len(members)} networks, #0 to #{len(members) - 1}, got {source!r}")
    if not mark and len(members) > 1:
        raise ValueError(f"{source} is the mean of {len(members)} networks; start with one of them, such as {source}#0")
    weights = members[int(number) if mark else 0].state_dict()
    shapes, others = ({k: v.shape for k, v in state.items()} for state in (network.state_dict(), weights))
    if shapes != others:
        names = sorted(k for k in shapes.keys() | others.keys() if shapes.get(k) != others.get(k))
        raise ValueError(f"{source} is another network than the one to train; they differ in {', '.join(names[:3])}")
    network.load_state_dict(weights)


def _config(training: Training, split: Split, data_dir: Path | None) -> dict[str, Any]:
    """Return what a run records: what it is trained from, and the arguments of `build`."""
    config = {**asdict(training), "data_dir": str(data_dir.resolve()) if data_dir else None}
    return config | {"classes": split.classes, "network": build_arguments(config["model"], split)}


def _fingerprints(training: Training, split: Split, test: Split) -> dict[str, Any]:
    """Return what tells whether images of one's own are still the same; those of known data sets do not change."""
    return {"images": {"train": split.fingerprint, "test": test.fingerprint}} if training.data in OWN else {}


def _write_config(run: Run, config: dict[str, Any], device: torch.device, processes: int = 1) -> None:
    text = json.dumps({**config, "hardware": hardware(device), "processes": processes}, indent=2)
    write_atomically(run.config_path, text.encode())


def held_out_images(split: Split, examples: int) -> Split:
    """Return the training images after the first `examples`."""
    if not 0 < examples < len(split.labels):
        raise ValueError(f"examples must be from 1 to {len(split.labels) - 1} to leave some out, got {examples}")
    return Split(split.images[examples:], split.labels[examples:], split.classes)


def _require_fitting(training: Training, split: Split, world: World, data_dir: Path | None) -> None:
    """Refuse a single class, too large a batch, and images whose sides the network cannot halve often enough."""
    if split.classes is not None and len(split.classes) < 2:
        source = data_dir or training.data
        raise DataError(f"{source} has {split.classes[0]!r} as its only class; a network tells two or more apart")
    require_batch_size(len(split.labels), training.recipe.batch_size, world)
    model = training.model
    (h, w), name = split.images.shape[2:], model.name
    known = models.NETWORKS[name].divisor if name in models.NETWORKS else 1
    divisor = divisor_of(model.layers) if model.layers else known
    if h % divisor or w % divisor:
        near = [max(divisor, divisor * round(side / divisor)) for side in (h, w)]
        size = str(near[0]) if near[0] == near[1] else f"[{near[0]},{near[1]}]"
        raise ValueError(
            f"{name} takes images whose sides are multiples of {divisor}, and these have {w} x {h} pixels; "
            f"--resize {size} makes them fit"
        )
    if h * w > _LARGE:
        print(f"images of {w} x {h} pixels make a large network, which is slow; --resize 64 makes a smaller one")


def _require_resumable(run: Run, training: Training, split: Split, images: dict[str, Any]) -> None:
    """Refuse to resume with other data, before the configuration is written anew."""
    if run.checkpoint_path.exists():
        recipe = training.recipe
        require_resumable(run.checkpoint_path, recipe, len(split.labels) // recipe.batch_size)
        if (before := run.config.get("images")) is not None and before != images.get("images"):
            raise CheckpointError(f"{run.folder} was trained on other images than there are now; begin a new run")


def _fit(
    network: nn.Module,
    split: Split,
    test: Split,
    recipe: Recipe,
    run: Run,
    resume: bool,
    world: World,
    label: str,
    loggers: Sequence[Logger],
) -> None:
    steps = recipe.epochs * (len(split.labels) // recipe.batch_size)
    interval = 0.1 if world.rank == 0 and sys.stderr.isatty() else 10
    with tqdm(total=steps, unit="step", disable=world.rank != 0, mininterval=interval) as bar:

        def on_step(figures: dict[str, Any]) -> None:
            bar.update(figures["step"] - bar.n)
            bar.set_postfix(_postfix(figures, bar.format_dict["rate"], recipe.batch_size), refresh=False)
            for logger in loggers:
                logger.step(figures)

        started, known = time.process_time(), run.metrics()
        for figures in fit(network, split, recipe, run.checkpoint_path, resume=resume, world=world, on_step=on_step):
            if any(figures.items() <= before.items() for before in known):  # the run died after it had written them
                continue
            record = {**figures, **_test_figures(network, test, world), "cpu_seconds": time.process_time() - started}
            started = time.process_time()
            if world.rank == 0:
                run.add_metrics(record)
                tqdm.write(_line(record, label), file=sys.stdout)
                sys.stdout.flush()
                for logger in loggers:
                    logger.epoch(record)


def _postfix(figures: dict[str, Any], rate: float | None, batch_size: int) -> dict[str, str]:
    """Return what the bar shows after a step; `rate` is in steps per second, if it is known yet."""
    shown = {"loss": f"{figures['loss']:.4f}", "acc": f"{figures['accuracy']:.1%}"}
    return {**shown, "images/s": f"{rate * batch_size:.0f}"} if rate else shown


def _test_figures(network: nn.Module, test: Split, world: World) -> dict[str, Any]:
    """Return clean and certified accuracy on the whole test set, and by class; each process computes its share."""
    share = Split(test.images[world.rank :: world.size], test.labels[world.rank :: world.size])
    certificates = certify(network, batches(share, 500), rounding=False)
    certified = [(certificates.radius > eps).sum() for eps in certificates.eps]
    names = test.classes if test.classes is not None and len(test.classes) <= _MOST_CLASSES else ()
    of_class = [(share.labels == k).cpu() for k in range(len(names))]
    counts = [certificates.correct.sum(), *certified, torch.tensor(len(share.labels))]
    counts += [c for which in of_class for c in (certificates.correct.cpu()[which].sum(), which.sum())]
    dtype = torch.float64 if budget.has_double(world.device) else torch.float32
    sums = total(torch.stack([c.to("cpu", dtype) for c in counts]), world).cpu().tolist()
    right, n, classes = sums[: 1 + len(certified)], sums[1 + len(certified)], sums[2 + len(certified) :]
    shares = {f"{eps * 255:.0f}/255": k / n for eps, k in zip(certificates.eps, right[1:], strict=True)}
    figures = {"test_accuracy": right[0] / n, "certified": shares, "lipschitz_bound": certificates.lipschitz}
    by_class = {name: classes[2 * k] / max(classes[2 * k + 1], 1) for k, name in enumerate(names)}
    return {**figures, "by_class": by_class} if by_class else figures


def _line(record: dict[str, Any], label: str) -> str:
    certified = "  ".join(f"{v:.1%} at {k}" for k, v in record["certified"].items())
    return (
        f"epoch {record['epoch']:3d}  loss {record['loss']:.4f}  train {record['accuracy']:.1%}  "
        f"{label} {record['test_accuracy']:.1%}  certified {certified}  ({record['seconds']:.0f} s)"
    )
