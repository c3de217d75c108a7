"""The training loop, from top to bottom."""

__all__ = ["Recipe", "TrainingError", "fit", "require_resumable"]

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from orthoconv import budget
from orthoconv.certificates.constants import PairwiseConstants
from orthoconv.data.split import Split
from orthoconv.devices import device_of
from orthoconv.modules import reduced_products
from orthoconv.train.checkpoint import load_checkpoint, save_checkpoint
from orthoconv.train.distributed import World, average_gradients, share_buffers, total
from orthoconv.train.metering import Meter, TrainingError
from orthoconv.train.muon import Muon
from orthoconv.train.objectives import OBJECTIVES
from orthoconv.train.recipe import YOUNGER, Recipe
from orthoconv.train.schedule import SCHEDULES
from orthoconv.train.sources import Source, source_of
from orthoconv.weights import CheckpointError, load_weights

_CHECKPOINT_SECONDS = 180  # that a run loses at most when it is killed
_FIGURES = ("epoch", "step", "loss", "accuracy", "lr", "seconds")


def fit(
    model: nn.Module,
    data: Split | tuple[Any, Any] | DataLoader[Any],
    recipe: Recipe,
    checkpoint: str | os.PathLike[str],
    *,
    resume: bool = False,
    world: World = World(0, 1),  # noqa: B008
    on_step: Callable[[dict[str, Any]], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """Train `model` in place; after each epoch, write a checkpoint and yield the figures of the epoch.

    Random numbers depend on the seed, the epoch and the step alone: a run that is resumed from its checkpoint ends
    with the same weights as one that never stopped. If that checkpoint ends an epoch, its figures are yielded again,
    because the process may have died before it could use them.

    Everything is computed on the device of the model. The images are moved there once, if they are few enough. On an
    accelerator the figures of the steps are read, and `on_step` is called, every `budget.READ_EVERY` steps.

    Arguments:
        model: Function of images to logits.
        data: Training images: a `Split`, on any device; a pair of images and labels, arrays or tensors, such as
            `orthoconv.data.as_split` takes; or a DataLoader that yields such pairs. Bytes are divided by 255.
        recipe: How to train. A DataLoader has a batch size of its own. What it yields is augmented as everything else,
            unless the recipe's `augment` is False.
        checkpoint: File to write checkpoints to, each in place of the one before; a str or a Path.
        resume: Whether to continue from `checkpoint`, if it exists.
        world: This process among those of a distributed run.
        on_step: Called with the figures of the epoch so far when they are read; on a CPU after each step.

    >>> import tempfile
    >>> from orthoconv.data import load
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file, recipe = Path(folder) / "checkpoint.safetensors", Recipe(epochs=2, augment=False)
    ...     [figures["epoch"] for figures in fit(model, load("digits")[0], recipe, file)]
    [1, 2]
    """
    checkpoint = _path(checkpoint)
    recipe = replace(recipe, lipschitz=1.0 if recipe.lipschitz is None else recipe.lipschitz)
    source = source_of(data, recipe, world, device_of(model))
    steps = source.steps
    optimizer = _optimizer(model, recipe)
    done, sums, saved = 0, [0.0] * 3, time.monotonic()
    if resume and checkpoint.exists():
        done, sums, last = _resume(checkpoint, model, optimizer, recipe, steps)
        if last:
            yield last
    engine: Any = torch.compile(model) if recipe.compile else model
    constants, meter = _constants(model, source, recipe), Meter(model, sums)
    model.train()

    for epoch in range(done // steps, recipe.epochs):
        started = time.perf_counter()
        for k, (x, labels) in enumerate(source.epoch(epoch, done % steps), done % steps):
            progress = (done + 1) / (recipe.epochs * steps)
            rate = _set_rate(optimizer, SCHEDULES[recipe.schedule](progress, recipe.lr))
            loss, figures = _loss(engine, constants, x, labels, recipe, progress)
            _differentiate(loss, model, world)
            meter.check(done + 1, loss, _kept(checkpoint))
            optimizer.step()
            done += 1
            if done % recipe.project_every == 0:
                _project(model)

            meter.add(total(figures, world))
            save = k + 1 < steps and _is_due(recipe, done, saved, world)
            if save or k + 1 == steps or meter.is_due(done):
                sums = meter.read(_kept(checkpoint))
                _report(on_step, done, epoch, sums)
            if save:
                saved = _save(checkpoint, model, optimizer, recipe, (done, steps), sums, None, world)

        _project(model)
        values = (epoch + 1, done, sums[0] / sums[2], sums[1] / sums[2], rate, time.perf_counter() - started)
        last, sums = dict(zip(_FIGURES, values, strict=True)), [0.0] * 3
        meter.reset(sums)
        saved = _save(checkpoint, model, optimizer, recipe, (done, steps), sums, last, world)
        yield last
        model.train()


def _path(checkpoint: object) -> Path:
    """Return the path of a checkpoint."""
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint must be a str or a Path, got {checkpoint!r}")
    return Path(checkpoint)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimizer == "muon":
        return Muon(model, recipe.lr)
    return torch.optim.Adam(model.parameters(), lr=recipe.lr)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _constants(model: nn.Module, source: Source, recipe: Recipe) -> PairwiseConstants | None:
    """Return the constants of each pair of classes, for a loss that asks for them."""
    pairwise = OBJECTIVES[recipe.loss].pairwise
    return PairwiseConstants(model, source.shape, recipe.lipschitz or 1.0) if pairwise else None


def _report(on_step: Callable[[dict[str, Any]], object] | None, done: int, epoch: int, sums: list[float]) -> None:
    if on_step is not None:
        on_step({"step": done, "epoch": epoch, "loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]})


def _kept(checkpoint: Path) -> str:
    if checkpoint.exists():
        return f"; the last good checkpoint is {checkpoint}"
    return "; no checkpoint was written yet"


def _loss(
    engine: nn.Module, pairwise: PairwiseConstants | None, x: Tensor, labels: Tensor, recipe: Recipe, progress: float
) -> tuple[Tensor, Tensor]:
    """Return the loss, and three sums over the batch: of losses, of correct classes, of images."""
    device = device_of(engine)
    x, labels = x.to(device), labels.to(device)
    if recipe.precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16), reduced_products(engine):
            logits = engine(x).float()
    else:
        logits = engine(x)
    differences = None if pairwise is None else pairwise()
    loss = OBJECTIVES[recipe.loss].loss(logits, labels, recipe.constants(progress), differences)
    correct = (logits.detach().argmax(1) == labels).sum()
    figures = torch.stack((loss.detach() * len(x), correct, torch.full_like(correct, len(x))))
    return loss, figures.double() if budget.has_double(device) else figures


def _differentiate(loss: Tensor, model: nn.Module, world: World) -> None:
    """Replace the gradients of the parameters by those of the loss, its mean over all processes."""
    model.zero_grad()
    loss.backward()
    average_gradients(model, world)


def _project(model: nn.Module) -> None:
    for module in model.modules():
        if callable(project := getattr(module, "project", None)):
            project()


def _save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, count: tuple[int, int],
    sums: list[float], last: dict[str, Any] | None, world: World,
) -> float:  # fmt: skip
    """Write a checkpoint, and return the time; `count` is the steps done, and those of an epoch."""
    share_buffers(model, world)
    if world.rank == 0:
        state = {"done": count[0], "steps": count[1], "sums": sums, "recipe": asdict(recipe), "last": last}
        save_checkpoint(path, model, optimizer, state)
    return time.monotonic()


def _is_due(recipe: Recipe, done: int, saved: float, world: World) -> bool:
    """Return whether a checkpoint is written within an epoch; `saved` is the time of the last one.

    Several processes go by steps alone, since their clocks differ and all of them take part.
    """
    by_steps = recipe.checkpoint_every and done % recipe.checkpoint_every == 0
    return bool(by_steps) or (world.size == 1 and time.monotonic() - saved > _CHECKPOINT_SECONDS)


def _resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int
) -> tuple[int, list[float], dict[str, Any] | None]:
    """Read a checkpoint; return the steps done, the sums of the epoch, and the figures of an epoch that it ends."""
    state = load_checkpoint(path, model, optimizer, partial(_check_resumed, path, recipe, steps))
    return state["done"], state["sums"], state["last"]


def require_resumable(path: Path, recipe: Recipe, steps: int) -> None:
    """Refuse a checkpoint, before anything is written, that `fit` would refuse for its recipe or its data.

    Arguments:
        path: File of the checkpoint.
        recipe: How to train, with its `lipschitz`.
        steps: Steps of an epoch.
    """
    _check_resumed(path, recipe, steps, load_weights(path, None))


def _check_resumed(path: Path, recipe: Recipe, steps: int, state: dict[str, Any]) -> None:
    """Raise an error if a checkpoint does not say how far it is, or is of a run with another recipe or other data."""
    done, sums, theirs, last = (state.get(key) for key in ("done", "sums", "recipe", "last"))
    if not (type(done) is int and done >= 0 and _are_numbers(sums, 3) and isinstance(theirs, dict)):
        raise CheckpointError(f"{path} does not say how far its run had come: done={done!r}, sums={sums!r}")
    if last is not None and not (
        isinstance(last, dict) and tuple(last) == _FIGURES and _are_numbers(list(last.values()), len(_FIGURES))
    ):
        raise CheckpointError(f"{path} has figures of an epoch that cannot be read: {last!r}")
    ours = {**{name: getattr(recipe, name) for name in YOUNGER}, **recipe.settings}
    theirs = {**YOUNGER, **theirs}
    if changed := [k for k, v in ours.items() if theirs.get(k) != v]:
        raise CheckpointError(
            f"{path} is of a run with {changed[0]}={theirs.get(changed[0])!r}, "
            f"not {ours[changed[0]]!r}; a run is resumed with the recipe it began with"
        )
    if state.get("steps", steps) != steps:  # checkpoints of older versions do not have them
        raise CheckpointError(
            f"{path} is of a run with {state['steps']!r} steps an epoch, not {steps}; "
            "a run is resumed with the data it began with"
        )


def _are_numbers(values: Any, n: int) -> bool:
    return isinstance(values, list) and len(values) == n and all(type(v) in (int, float) for v in values)
