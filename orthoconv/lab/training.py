"""`orthoconv train`: a run from a configuration."""

__all__ = ["train"]

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from orthoconv.certify import certify
from orthoconv.data import Split, batches, load
from orthoconv.files import write_atomically
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import ModelSpec, Run, hardware
from orthoconv.train import CheckpointError, Recipe, fit, load_weights, save_weights
from orthoconv.train.distributed import World, finish, start, total

_THREADS = 1024  # more than any machine has; torch ends the process if it cannot start as many as it is asked for


def train(
    out: Path = Path("runs/train"),
    data: str = "digits",
    data_dir: Path | None = None,
    model: ModelSpec = ModelSpec(),  # noqa: B008
    recipe: Recipe = Recipe(),  # noqa: B008
    resume: bool = False,
    threads: int | None = None,
    examples: int = 0,
) -> None:
    """Train a network and certify it after each epoch.

    Args:
        out: Folder of the run.
        data: Data set: digits, digits32, cifar10, fashion_mnist, stl10 or folder.
        data_dir: Where the data set is; by default where it usually is.
        model: The network.
        recipe: How to train it.
        resume: Go on from the last checkpoint of the folder, if there is one.
        threads: Threads of the CPU to use; by default all.
        examples: Training images to use, the first ones; 0 for all.
    """
    if threads is not None:
        if not 1 <= threads <= _THREADS:
            raise ValueError(f"threads must be from 1 to {_THREADS}, got {threads}")
        torch.set_num_threads(threads)
    world, run = start(), Run(out)
    config: dict[str, Any] = {"data": data, "data_dir": str(data_dir) if data_dir else None, "model": asdict(model)}
    config |= {"recipe": asdict(recipe), **({"examples": examples} if examples else {})}
    if not resume and (run.metrics_path.exists() or run.checkpoint_path.exists()):
        raise FileExistsError(f"{out} has a run already; pass --resume true to go on with it, or another --out")
    if resume and run.config_path.exists():
        _require_same(run, config)
    if examples < 0:
        raise ValueError(f"examples must be at least 0, got {examples}")
    training, test = load(data, data_dir, download_bar())
    training = training.first(examples)
    torch.manual_seed(recipe.seed)
    network = model.build(training)
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**config, "hardware": hardware(), "processes": world.size}, indent=2)
        write_atomically(run.config_path, lambda file: file.write(text.encode()))
        if not (resume and run.initial_path.exists()):
            save_weights(run.initial_path, network, config)
        _forget_later(run, resume)
    _fit(network, training, test, recipe, run, resume, world)
    finish(world)
    if world.rank == 0:
        save_weights(run.weights_path, network, {**config, "metrics": run.metrics()[-1:]})
        print(f"weights: {run.weights_path}")


def _require_same(run: Run, config: dict[str, Any]) -> None:
    """A run is resumed with the data and the network it began with; its checkpoint holds the recipe to that, too."""
    before = run.config
    for part in ("data", "model", "examples"):
        if before.get(part) != config.get(part):
            raise CheckpointError(f"{run.folder} is a run with {part} {before.get(part)}, not {config.get(part)}")


def _fit(
    network: nn.Module, training: Split, test: Split, recipe: Recipe, run: Run, resume: bool, world: World
) -> None:
    steps = len(training.labels) // recipe.batch_size
    quiet = world.rank != 0 or not sys.stderr.isatty()
    with tqdm(
        total=recipe.epochs * steps, unit="step", disable=world.rank != 0, mininterval=10 if quiet else 0.1
    ) as bar:

        def on_step(figures: dict[str, Any]) -> None:
            bar.update(figures["step"] - bar.n)
            rate = (bar.format_dict["rate"] or 0) * recipe.batch_size
            postfix = {"loss": f"{figures['loss']:.4f}", "acc": f"{figures['accuracy']:.1%}", "images/s": f"{rate:.0f}"}
            bar.set_postfix(postfix, refresh=False)

        for figures in fit(network, training, recipe, run.checkpoint_path, resume=resume, world=world, on_step=on_step):
            record = {**figures, **_test_figures(network, test, world)}
            if world.rank == 0:
                run.write_metrics([*run.metrics(), record])
                tqdm.write(_line(record), file=sys.stdout)
                sys.stdout.flush()


def _test_figures(network: nn.Module, test: Split, world: World) -> dict[str, Any]:
    """Clean and certified accuracy on the whole test set, each process its share."""
    share = Split(test.images[world.rank :: world.size], test.labels[world.rank :: world.size])
    found = certify(network, batches(share, 500), rounding=False)
    counts = [found.correct.sum(), *((found.radius > eps).sum() for eps in found.eps), torch.tensor(len(share.labels))]
    *right, n = total(torch.stack([c.double().cpu() for c in counts]), world).tolist()
    certified = {f"{eps * 255:.0f}/255": k / n for eps, k in zip(found.eps, right[1:], strict=True)}
    return {"test_accuracy": right[0] / n, "certified": certified, "lipschitz_bound": found.lipschitz}


def _line(record: dict[str, Any]) -> str:
    certified = "  ".join(f"{v:.1%} at {k}" for k, v in record["certified"].items())
    return (
        f"epoch {record['epoch']:3d}  loss {record['loss']:.4f}  train {record['accuracy']:.1%}  "
        f"test {record['test_accuracy']:.1%}  certified {certified}  ({record['seconds']:.0f} s)"
    )


def _forget_later(run: Run, resume: bool) -> None:
    """Drop the figures of epochs after the checkpoint that the run goes on from."""
    if not resume or not run.metrics_path.exists():
        return
    done = _steps_done(run.checkpoint_path)
    run.write_metrics([m for m in run.metrics() if m["step"] <= done])


def _steps_done(path: Path) -> int:
    if not path.exists():
        return 0
    done = load_weights(path, None).get("done")
    if not isinstance(done, int):
        raise CheckpointError(f"{path} does not say how far its run had come: done={done!r}")
    return done
