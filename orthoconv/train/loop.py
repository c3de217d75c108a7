"""The training loop, from top to bottom."""

__all__ = ["Recipe", "TrainingError", "fit"]

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from orthoconv.data.batches import augment, epoch_order, generator
from orthoconv.data.split import Split
from orthoconv.train.checkpoint import load_checkpoint, save_checkpoint
from orthoconv.train.distributed import World, total
from orthoconv.train.loss import hinge_loss
from orthoconv.train.schedule import piecewise_triangular
from orthoconv.weights import CheckpointError


class TrainingError(Exception):
    """A run that cannot go on; the message says where it stopped and what is kept."""


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: Passes over the data.
        batch_size: Images in a step, over all processes.
        lr: Highest learning rate.
        loss: "hinge" or "cross_entropy".
        eps0: Radius that the hinge asks a certificate for.
        margin_factor: Factor of the margin, margin_factor * lipschitz * eps0: 1 in the released code, sqrt(2) in the
            paper.
        lipschitz: Bound of the network that the margin counts with.
        augment: Whether to crop and flip.
        project_every: Steps between the projections of layers that have a method `project`; also after each epoch.
        checkpoint_every: Steps between checkpoints; 0 for one after each epoch only.
        seed: Seed of the weights, the order of the images and the augmentation.
    """

    epochs: int = 10
    batch_size: int = 256
    lr: float = 0.01
    loss: Literal["hinge", "cross_entropy"] = "hinge"
    eps0: float = 0.5
    margin_factor: float = 1.0
    lipschitz: float = 1.0
    augment: bool = True
    project_every: int = 100
    checkpoint_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("project_every", 1), ("checkpoint_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        for name in ("lr", "eps0", "margin_factor", "lipschitz"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        if self.loss not in ("hinge", "cross_entropy"):
            raise ValueError(f"loss must be 'hinge' or 'cross_entropy', got {self.loss!r}")
        if type(self.augment) is not bool:
            raise ValueError(f"augment must be True or False, got {self.augment!r}")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int of 64 bits, got {self.seed!r}")


def fit(
    model: nn.Module,
    data: Split,
    recipe: Recipe,
    checkpoint: Path,
    *,
    resume: bool = False,
    world: World = World(0, 1),  # noqa: B008
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Train `model` in place, and yield the figures of each epoch after it.

    Random numbers depend on the seed, the epoch and the step alone, so that a run resumed from its checkpoint goes on
    as if it had not stopped.

    Arguments:
        model: Function of images to logits.
        data: Training images, all in memory.
        recipe: How to train.
        checkpoint: File to write checkpoints to, each in place of the one before.
        resume: Whether to go on from `checkpoint`, if it exists.
        world: This process among those of a distributed run.
        on_step: Called after each step with its figures.
    """
    n, size = len(data.labels), recipe.batch_size
    if size > n or size % world.size:
        raise ValueError(f"batch_size must be at most {n} and a multiple of {world.size} processes, got {size}")
    steps = n // size
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    margin = recipe.margin_factor * recipe.lipschitz * recipe.eps0
    done, sums = _resume(checkpoint, model, optimizer, recipe) if resume and checkpoint.exists() else (0, [0.0] * 3)
    engine = model if world.size == 1 else DistributedDataParallel(model)
    model.train()

    for epoch in range(done // steps, recipe.epochs):
        order, started = epoch_order(n, recipe.seed, epoch), time.perf_counter()
        for k in range(done % steps, steps):
            rate = piecewise_triangular((done + 1) / (recipe.epochs * steps), recipe.lr)
            for group in optimizer.param_groups:
                group["lr"] = rate

            batch = order[k * size : (k + 1) * size]
            x, labels = data.images[batch], data.labels[batch]
            if recipe.augment:
                x = augment(x, generator(recipe.seed, epoch, k))
            mine = slice(world.rank, None, world.size)
            x, labels = x[mine].to(device), labels[mine].to(device)

            logits = engine(x)
            loss = hinge_loss(logits, labels, margin) if recipe.loss == "hinge" else F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            _require_finite(loss, model, done, checkpoint)
            optimizer.step()
            done += 1
            if done % recipe.project_every == 0:
                _project(model)

            correct = (logits.detach().argmax(1) == labels).sum()
            figures = torch.stack((loss.detach() * len(x), correct, torch.tensor(len(x), device=device))).double()
            sums = [a + b for a, b in zip(sums, total(figures, world).tolist(), strict=True)]
            if on_step is not None:
                on_step({"step": done, "epoch": epoch, "loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]})
            if k + 1 < steps and recipe.checkpoint_every and done % recipe.checkpoint_every == 0:
                _save(checkpoint, model, optimizer, recipe, done, sums, world)

        _project(model)
        summary = {"epoch": epoch + 1, "step": done, "loss": sums[0] / sums[2], "accuracy": sums[1] / sums[2]}
        sums = [0.0] * 3
        yield {**summary, "lr": rate, "seconds": time.perf_counter() - started}
        model.train()
        _save(checkpoint, model, optimizer, recipe, done, sums, world)


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
    world: World,
) -> None:  # fmt: skip
    if world.rank == 0:
        save_checkpoint(path, model, optimizer, {"done": done, "sums": sums, "recipe": asdict(recipe)})


def _resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> tuple[int, list[float]]:
    state = load_checkpoint(path, model, optimizer)
    done: Any = state.get("done")
    sums: Any = state.get("sums")
    theirs: Any = state.get("recipe")
    counted = isinstance(sums, list) and len(sums) == 3 and all(isinstance(v, float) for v in sums)
    if type(done) is not int or done < 0 or not counted or not isinstance(theirs, dict):
        raise CheckpointError(f"{path} does not say how far its run had come: done={done!r}, sums={sums!r}")
    ours = {k: v for k, v in asdict(recipe).items() if k != "checkpoint_every"}
    if changed := [k for k, v in ours.items() if theirs.get(k) != v]:
        raise CheckpointError(
            f"{path} is of a run with {changed[0]}={theirs.get(changed[0])!r}, "
            f"not {ours[changed[0]]!r}; a run is resumed with the recipe it began with"
        )
    return done, sums
