"""The training loop, from top to bottom."""

__all__ = ["Recipe", "TrainingError", "fit"]

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from orthoconv.data.batching import augment, epoch_order, generator
from orthoconv.data.split import Split
from orthoconv.train.checkpoint import load_checkpoint, save_checkpoint
from orthoconv.train.distributed import World, total
from orthoconv.train.losses import hinge_loss, offset_cross_entropy
from orthoconv.train.schedule import piecewise_triangular
from orthoconv.weights import CheckpointError

_LOSSES = ("hinge", "cross_entropy", "offset_cross_entropy")
_ONLY_FOR = {"offset": "offset_cross_entropy", "temperature": "offset_cross_entropy"}  # fields that one loss needs
_FIGURES = ("epoch", "step", "loss", "accuracy", "lr", "seconds")


class TrainingError(Exception):
    """A run cannot continue; the message says at which step, and which checkpoint there is."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: Passes over the data.
        batch_size: Images in a step, over all processes.
        lr: Highest learning rate.
        loss: "hinge", "cross_entropy" or "offset_cross_entropy".
        eps0: Radius for which the hinge loss asks for a certificate.
        margin_factor: Factor of the margin, margin_factor * lipschitz * eps0: 1 in the released code, sqrt(2) in the
            paper.
        lipschitz: Lipschitz bound in the margin. By default that of the network, if `orthoconv train` builds it, and
            otherwise 1.
        augment: Whether to crop and flip.
        project_every: Steps between the projections of layers that have a method `project`; also after each epoch.
        checkpoint_every: Steps between checkpoints; 0 for one after each epoch only.
        seed: Seed of the weights, the order of the images and the augmentation.
        offset: Lead that the loss "offset_cross_entropy" asks of the true class.
        temperature: Number that the loss "offset_cross_entropy" divides logits by.
    """

    epochs: int = 10
    batch_size: int = 256
    lr: float = 0.01
    loss: Literal["hinge", "cross_entropy", "offset_cross_entropy"] = "hinge"
    eps0: float = 0.5
    margin_factor: float = 1.0
    lipschitz: float | None = None
    augment: bool = True
    project_every: int = 100
    checkpoint_every: int = 0
    seed: int = 0
    offset: float = 0.4
    temperature: float = 0.25

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("project_every", 1), ("checkpoint_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        bound = () if self.lipschitz is None else ("lipschitz",)
        for name in ("lr", "eps0", "margin_factor", "temperature", *bound):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if type(self.offset) not in (int, float) or not 0 <= self.offset <= sys.float_info.max:
            raise ValueError(f"offset must be at least 0 and finite, got {self.offset!r}")
        if self.loss not in _LOSSES:
            raise ValueError(f"loss must be one of {', '.join(map(repr, _LOSSES))}, got {self.loss!r}")
        if type(self.augment) is not bool:
            raise ValueError(f"augment must be True or False, got {self.augment!r}")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int of 64 bits, got {self.seed!r}")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that the weights depend on; runs are the same run if these are equal.

        Fields that only another loss needs are left out. Records and checkpoints of older versions do not have them.
        """
        unused = {"checkpoint_every", *(name for name, loss in _ONLY_FOR.items() if loss != self.loss)}
        return {name: value for name, value in asdict(self).items() if name not in unused}


def fit(
    model: nn.Module,
    data: Split,
    recipe: Recipe,
    checkpoint: Path,
    *,
    resume: bool = False,
    world: World = World(0, 1),  # noqa: B008
    on_step: Callable[[dict[str, Any]], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """Train `model` in place; after each epoch, write a checkpoint and yield the figures of the epoch.

    Random numbers depend on the seed, the epoch and the step alone: a run that is resumed from its checkpoint ends
    with the same weights as one that never stopped. If that checkpoint ends an epoch, its figures are yielded again,
    because the process may have died before it could use them.

    Arguments:
        model: Function of images to logits.
        data: Training images, all in memory.
        recipe: How to train.
        checkpoint: File to write checkpoints to, each in place of the one before.
        resume: Whether to continue from `checkpoint`, if it exists.
        world: This process among those of a distributed run.
        on_step: Called after each step with its figures.
    """
    n, size = len(data.labels), recipe.batch_size
    if size > n or size % world.size:
        raise ValueError(f"batch_size must be at most {n} and a multiple of {world.size} processes, got {size}")
    steps, recipe = n // size, replace(recipe, lipschitz=1.0 if recipe.lipschitz is None else recipe.lipschitz)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    done, sums = 0, [0.0] * 3
    if resume and checkpoint.exists():
        done, sums, last = _resume(checkpoint, model, optimizer, recipe)
        if last:
            yield last
    engine = model if world.size == 1 else DistributedDataParallel(model)
    model.train()

    for epoch in range(done // steps, recipe.epochs):
        order, started = epoch_order(n, recipe.seed, epoch), time.perf_counter()
        for k in range(done % steps, steps):
            rate = piecewise_triangular((done + 1) / (recipe.epochs * steps), recipe.lr)
            for group in optimizer.param_groups:
                group["lr"] = rate

            x, labels = _batch(data, order[k * size : (k + 1) * size], recipe, epoch, k, world)
            loss, figures = _loss(engine, x, labels, recipe)
            optimizer.zero_grad()
            loss.backward()
            _require_finite(loss, model, done, checkpoint)
            optimizer.step()
            done += 1
            if done % recipe.project_every == 0:
                _project(model)

            sums = [a + b for a, b in zip(sums, total(figures, world).tolist(), strict=True)]
            if on_step is not None:
                on_step({"step": done, "epoch": epoch, "loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]})
            if k + 1 < steps and recipe.checkpoint_every and done % recipe.checkpoint_every == 0:
                _save(checkpoint, model, optimizer, recipe, done, sums, None, world)

        _project(model)
        values = (epoch + 1, done, sums[0] / sums[2], sums[1] / sums[2], rate, time.perf_counter() - started)
        last, sums = dict(zip(_FIGURES, values, strict=True)), [0.0] * 3
        _save(checkpoint, model, optimizer, recipe, done, sums, last, world)
        yield last
        model.train()


def _batch(data: Split, indices: Tensor, recipe: Recipe, epoch: int, step: int, world: World) -> tuple[Tensor, Tensor]:
    """Return the share of this process of a batch, augmented as a whole."""
    x, labels = data.images[indices], data.labels[indices]
    if recipe.augment:
        x = augment(x, generator(recipe.seed, epoch, step))
    return x[world.rank :: world.size], labels[world.rank :: world.size]


def _loss(engine: nn.Module, x: Tensor, labels: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the loss, and three sums over the batch: of losses, of correct classes, of images."""
    device = next(engine.parameters()).device
    x, labels = x.to(device), labels.to(device)
    logits = engine(x)
    if recipe.loss == "hinge":
        loss = hinge_loss(logits, labels, recipe.margin_factor * (recipe.lipschitz or 1.0) * recipe.eps0)
    elif recipe.loss == "offset_cross_entropy":
        loss = offset_cross_entropy(logits, labels, recipe.offset, recipe.temperature)
    else:
        loss = F.cross_entropy(logits, labels)
    correct = (logits.detach().argmax(1) == labels).sum()
    return loss, torch.stack((loss.detach() * len(x), correct, torch.tensor(len(x), device=device))).double()


def _project(model: nn.Module) -> None:
    for module in model.modules():
        if callable(project := getattr(module, "project", None)):
            project()


def _require_finite(loss: Tensor, model: nn.Module, done: int, checkpoint: Path) -> None:
    """Stop before a step that would spoil the weights."""
    norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
    if bool(torch.isfinite(loss)) and bool(torch.isfinite(torch.stack(list(norms.values())).sum())):
        return
    worst = max(norms, key=lambda name: math.inf if not norms[name].isfinite() else norms[name].item())
    kept = f"the last good checkpoint is {checkpoint}" if checkpoint.exists() else "no checkpoint was written yet"
    raise TrainingError(
        f"step {done + 1}: the loss is {loss.item()}; the largest gradient is that of {worst} "
        f"({norms[worst].item():.3g}); {kept}. A lower learning rate may help."
    )


def _save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, done: int, sums: list[float],
    last: dict[str, Any] | None, world: World,
) -> None:  # fmt: skip
    if world.rank == 0:
        state = {"done": done, "sums": sums, "recipe": asdict(recipe), "last": last}
        save_checkpoint(path, model, optimizer, state)


def _resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe
) -> tuple[int, list[float], dict[str, Any] | None]:
    """Read a checkpoint; return the steps done, the sums of the epoch, and the figures of an epoch that it ends."""
    state = load_checkpoint(path, model, optimizer)
    done, sums, theirs, last = (state.get(key) for key in ("done", "sums", "recipe", "last"))
    if not (type(done) is int and done >= 0 and _are_numbers(sums, 3) and isinstance(theirs, dict)):
        raise CheckpointError(f"{path} does not say how far its run had come: done={done!r}, sums={sums!r}")
    if last is not None and not (
        isinstance(last, dict) and tuple(last) == _FIGURES and _are_numbers(list(last.values()), len(_FIGURES))
    ):
        raise CheckpointError(f"{path} has figures of an epoch that cannot be read: {last!r}")
    ours = recipe.settings
    if changed := [k for k, v in ours.items() if theirs.get(k) != v]:
        raise CheckpointError(
            f"{path} is of a run with {changed[0]}={theirs.get(changed[0])!r}, "
            f"not {ours[changed[0]]!r}; a run is resumed with the recipe it began with"
        )
    return done, sums, last  # type: ignore[return-value]


def _are_numbers(values: Any, n: int) -> bool:
    return isinstance(values, list) and len(values) == n and all(type(v) in (int, float) for v in values)
