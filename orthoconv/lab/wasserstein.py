"""`orthoconv wasserstein`: how far a data set is from another, by a critic of orthogonal layers."""

__all__ = ["CriticSpec", "estimate_distance", "wasserstein"]

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from orthoconv import models
from orthoconv.data import load
from orthoconv.files import write_atomically
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import digest
from orthoconv.lab.wgan import GeneratorSpec, samples_of, trained_generator
from orthoconv.train import CriticRecipe, TrainingError, WassersteinEstimate, wasserstein_distance

RATES = (0.1, 0.01, 0.001, 0.0001)


@dataclass(frozen=True)
class CriticSpec:
    """What is compared, and by which critic.

    Attributes:
        data: Data set.
        other: What it is compared with: samples of a generator trained on it, or itself moved by a random vector.
        conv: Convolution of the critic.
        width: Factor of the critic's channels, 64 to 512.
        kernel_size: Taps of its convolutions.
        rates: Learning rates, of which the best estimate counts: each is a lower bound.
        shift: Norm of the vector.
        examples: Images of each sample, training and held out.
        recipe: How the critic is trained.
        generator: How the generator is.
        seed: Seed of the critic, the vector and the samples.
    """

    data: str = "cifar10"
    other: Literal["generator", "shift"] = "generator"
    conv: str = "cayley"
    width: float = 1
    kernel_size: int = 4
    rates: Sequence[float] = RATES
    shift: float = 5.0
    examples: int = 10_000
    recipe: dict[str, Any] = field(default_factory=dict)
    generator: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


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
) -> None:
    """Estimate a Wasserstein distance from below, by a 1-Lipschitz critic: images to a generator's, or to moved images.

    Args:
        data: Data set: digits32, cifar10, stl10, fashion_mnist or folder.
        other: generator (a small WGAN-GP trained here), or shift, where the distance is known.
        conv: Convolution of the critic.
        width: Factor of the critic's channels.
        steps: Steps of the critic for each learning rate.
        rates: Learning rates to try.
        shift: Norm of the vector that images are moved by.
        examples: Images of each sample.
        seed: Seed of everything.
        data_dir: Where the data set is.
        runs: Folder that keeps the generator.
    """
    spec = CriticSpec(data, other, conv, width, rates=list(rates), shift=shift, examples=examples, seed=seed,
                      recipe={"steps": steps})  # fmt: skip
    found = estimate_distance(spec, runs, data_dir)
    for rate, distance in found["by_rate"].items():
        print(f"learning rate {rate}: {'diverged' if distance is None else round(distance, 4)}")
    print(f"distance at least {found['distance']:.4f}, Lipschitz bound of the critic {found['lipschitz']:.7f}")
    if other == "shift":
        print(f"the distance is {shift:.4f}: {found['distance'] / shift:.2%} of it")


def estimate_distance(spec: CriticSpec, runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """The best estimate over the learning rates, on held-out samples where the distance is to a generator."""
    about = {k: v for k, v in asdict(spec).items() if k != "rates"}
    path = runs / "critics" / f"{digest(about)}.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    missing = [rate for rate in spec.rates if str(rate) not in done]
    (p, q), held_out = _samples(spec, runs, data_dir) if missing else ((None, None), None)
    for rate in missing:
        assert p is not None
        assert q is not None
        torch.manual_seed(spec.seed)
        critic = models.build(
            "critic", conv=spec.conv, width=spec.width, kernel_size=spec.kernel_size, classes=1,
            in_channels=p.shape[1], image_size=tuple(p.shape[2:]),
        )  # fmt: skip
        recipe = CriticRecipe(**{**spec.recipe, "lr": rate, "seed": spec.seed})
        try:
            done[str(rate)] = _with_bar(critic, p, q, recipe, held_out, f"{spec.conv}, {rate}")._asdict()
        except TrainingError:  # too high a rate
            done[str(rate)] = None
        _keep(path, done)
    found = {rate: done[str(rate)] for rate in spec.rates}
    by_rate = {str(rate): f and f["distance"] for rate, f in found.items()}
    best = max(((f["distance"], f["lipschitz"]) for f in found.values() if f), default=(-math.inf, math.nan))
    if math.isinf(best[0]):
        raise TrainingError(f"every learning rate of {list(spec.rates)} was too high")
    figures: dict[str, Any] = {"distance": best[0], "lipschitz": best[1], "by_rate": by_rate}
    if spec.other == "shift":
        figures["share"] = 100 * best[0] / spec.shift
    return figures


def _keep(path: Path, figures: dict[str, Any]) -> None:
    text = json.dumps(figures)
    write_atomically(path, lambda file: file.write(text.encode()))


def _with_bar(
    critic: nn.Module, p: Tensor, q: Tensor, recipe: CriticRecipe, held_out: tuple[Tensor, Tensor] | None, name: str
) -> WassersteinEstimate:
    with tqdm(total=recipe.steps, desc=name, leave=False, disable=not sys.stderr.isatty()) as bar:

        def on_step(step: int, gain: float) -> None:
            bar.update()

        return wasserstein_distance(critic, p, q, recipe, held_out=held_out, on_step=on_step)


def _samples(
    spec: CriticSpec, runs: Path, data_dir: Path | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Two samples to train on, and two to report."""
    training, test = load(spec.data, data_dir, download_bar())
    p = training.images[: spec.examples]
    if spec.other == "shift":
        v = torch.randn(p.shape[1:], generator=torch.Generator().manual_seed(spec.seed))
        return (p + v * (spec.shift / v.norm()), p), None
    recipe = GeneratorSpec(**spec.generator)
    name = "-".join(str(v) for v in asdict(recipe).values())
    make = trained_generator(recipe, training.images, runs / "generators" / f"{spec.data}-{name}.safetensors")
    held = test.images[: spec.examples]
    q, unseen = (samples_of(make, recipe.latent, n, spec.seed + k) for k, n in ((1, len(p)), (2, len(held))))
    return (p, q), (held, unseen)
