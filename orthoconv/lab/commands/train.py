"""`orthoconv train`: train a network from a configuration."""

__all__ = ["train"]

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from orthoconv.data import locate
from orthoconv.lab.configs import ModelSpec, Training
from orthoconv.lab.locks import locked
from orthoconv.lab.logging import TensorBoard
from orthoconv.lab.machine import use_device
from orthoconv.lab.preset import preset_opening
from orthoconv.lab.runs import Run
from orthoconv.lab.training import train_run
from orthoconv.train import Recipe

_MOST_THREADS = 1024  # torch ends the process if it cannot start as many threads as it is asked for


def train(
    out: Path = Path("runs/train"),
    data: str = "digits",
    data_dir: Path | None = None,
    model: ModelSpec = ModelSpec(),  # noqa: B008
    recipe: Recipe = Recipe(),  # noqa: B008
    resume: bool = False,
    threads: int | None = None,
    examples: int = 0,
    preset: str | None = None,
    device: str = "auto",
    precision: Literal["float32", "bf16"] | None = None,
    compile: bool | None = None,  # noqa: A002
    tensorboard: bool = False,
    resize: int | tuple[int, int] | None = None,
    split: float | None = None,
    data_seed: int = 0,
    start: str | None = None,
) -> None:
    """Train a network and certify it after each epoch.

    Example: orthoconv train --data digits --out runs/digits

    Args:
        out: Folder of the run.
        data: Data set: digits, digits32, cifar10, fashion_mnist, stl10; or folder, npz or idx for images of one's own,
            or their path.
        data_dir: Folder of the data set; by default its usual place.
        model: The network.
        recipe: How to train it.
        resume: Continue from the last checkpoint of the folder, if there is one.
        threads: Threads of the CPU to use; by default all.
        examples: Training images to use, the first ones; 0 for all. Images of one's own are in a random order, whose
            first ones have all classes about as often as the whole.
        preset: What the options begin with: cifar10-fast, cifar10-best, cifar10-finish, digits, fashion, own, or paper
            for the paper's recipe. By default that of the data set, and own for images of one's own. Other options
            override its fields.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        precision: float32 or bf16, in place of the recipe's.
        compile: Whether torch.compile translates the network, in place of the recipe's.
        tensorboard: Write the figures for TensorBoard, too, into the folder of the run.
        resize: Size to give the images, such as 32 or [24,32] for height and width; by default they keep theirs.
        split: Share of one's own images that are test images, if they are not in folders train and test; by default
            0.2.
        data_seed: Seed of that division, and of the order of one's own images.
        start: Network whose weights training begins with: folder of a run, file of weights, or name of a network of the
            package. It must be the same network; the members of a mean begin with those of a mean.
    """
    if preset is not None:
        print(preset_opening(preset), flush=True)
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise ValueError(f"threads must be from 1 to {_MOST_THREADS}, got {threads}")
        torch.set_num_threads(threads)
    own = recipe.compile if compile is None else compile
    recipe = replace(recipe, precision=precision or recipe.precision, compile=own)
    data, data_dir = locate(data, data_dir)
    training = Training(data, model, recipe, examples, resize, split, data_seed, start)
    first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun started
    with locked(out) if first else contextlib.nullcontext():
        loggers = [TensorBoard(out)] if tensorboard and first else []
        train_run(
            Run(out), training, data_dir, resume=resume, device=use_device(device), loggers=loggers, side_by_side=True
        )
