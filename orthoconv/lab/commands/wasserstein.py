"""`orthoconv wasserstein`: estimate the distance between a data set and a generator of images."""

__all__ = ["wasserstein"]

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from orthoconv.lab.distance import RATES, CriticSpec, estimate_distance
from orthoconv.lab.machine import use_device


def wasserstein(
    data: str = "cifar10",
    other: Literal["generator", "shift"] = "generator",
    conv: str = "cayley",
    width: float = 1,
    steps: int = 1000,
    rates: Sequence[float] = RATES,
    shift: float = 5.0,
    examples: int = 10_000,
    seed: int = 0,
    data_dir: Path | None = None,
    runs: Path = Path("runs/wasserstein"),
    device: str = "auto",
) -> None:
    """Estimate a Wasserstein distance from below by a 1-Lipschitz critic: images to a generator's, or to shifted ones.

    Example: orthoconv wasserstein --data digits32 --other shift --steps 200

    Args:
        data: Data set: digits32, cifar10, stl10, fashion_mnist or folder.
        other: generator (a small WGAN-GP trained here), or shift, whose distance is known.
        conv: Convolution of the critic.
        width: Factor of the critic's channels.
        steps: Steps of the critic for each learning rate.
        rates: Learning rates to try.
        shift: Norm of the vector that is added to the images.
        examples: Images of each sample.
        seed: Seed of everything.
        data_dir: Folder of the data set; by default its usual place.
        runs: Folder that keeps the generator.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    spec = CriticSpec(data, other, conv, width, rates=list(rates), shift=shift, examples=examples, seed=seed,
                      recipe={"steps": steps})  # fmt: skip
    figures = estimate_distance(spec, runs, data_dir, use_device(device))
    for rate, distance in figures["by_rate"].items():
        print(f"learning rate {rate}: {'diverged' if distance is None else round(distance, 4)}")
    print(f"distance at least {figures['distance']:.4f}, Lipschitz bound of the critic {figures['lipschitz']:.7f}")
    if other == "shift":
        print(f"the distance is {shift:.4f}: {figures['distance'] / shift:.2%} of it")
