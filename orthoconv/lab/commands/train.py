"""`orthoconv train`: train a network from a configuration."""

__all__ = ["train"]

from pathlib import Path

import torch

from orthoconv.lab.configs import ModelSpec, Training
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
) -> None:
    """Train a network and certify it after each epoch.

    Args:
        out: Folder of the run.
        data: Data set: digits, digits32, cifar10, fashion_mnist, stl10 or folder.
        data_dir: Folder of the data set; by default its usual place.
        model: The network.
        recipe: How to train it.
        resume: Continue from the last checkpoint of the folder, if there is one.
        threads: Threads of the CPU to use; by default all.
        examples: Training images to use, the first ones; 0 for all.
    """
    if threads is not None:
        if not 1 <= threads <= _MOST_THREADS:
            raise ValueError(f"threads must be from 1 to {_MOST_THREADS}, got {threads}")
        torch.set_num_threads(threads)
    train_run(Run(out), Training(data, model, recipe, examples), data_dir, resume=resume)
