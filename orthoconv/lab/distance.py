"""Wasserstein distances, estimated from below by a critic of orthogonal layers."""

__all__ = ["RATES", "CriticSpec", "estimate_distance"]

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from orthoconv import models
from orthoconv.data import Split, load, locate
from orthoconv.files import read_json, sha256, write_atomically
from orthoconv.lab.configs import digest
from orthoconv.lab.progress import download_bar, quiet_bar
from orthoconv.lab.wgan import GeneratorSpec, samples_of, trained_generator
from orthoconv.train import CriticRecipe, TrainingError, wasserstein_distance

RATES = (0.1, 0.01, 0.001, 0.0001)


@dataclass(frozen=True)
class CriticSpec:
    """Two distributions, and the critic that tells them apart.

    Attributes:
        data: Data set.
        other: What it is compared with: samples of a generator trained on it, or its own images plus a random vector.
        conv: Convolution of the critic.
        width: Factor of the critic's channels, 64 to 512.
        kernel_size: Taps of its convolutions.
        rates: Learning rates. Each gives a lower bound, and the largest one counts.
        shift: Norm of that vector.
        examples: Images of each sample, training and held out.
        recipe: How the critic is trained.
        generator: How the generator is trained.
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


def estimate_distance(
    spec: CriticSpec,
    runs: Path,
    data_dir: Path | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> dict[str, Any]:
    """Return the best estimate over the learning rates, and each of them; a generator is compared on held-out samples.

    Arguments:
        spec: What to compare, and how.
        runs: Folder that keeps the generator and the estimates so far.
        data_dir: Folder of the data set; by default its usual place.
        device: Device that computes.
    """
    data = cache(lambda: load(spec.data, data_dir, download_bar()))
    kind, folder = locate(spec.data, data_dir)
    mark = "" if folder is None else _digest_of_images(*data())  # the usual place always has the same images
    about = {k: v for k, v in asdict(spec).items() if k != "rates"} | ({"images": mark} if mark else {})
    path = runs / "critics" / f"{digest(about)}.json"
    done: dict[str, Any] = read_json(path) if path.exists() else {}
    source = f"{kind}-{mark}" if mark else kind
    samples = cache(lambda: _samples(spec, runs, *data(), source, device))  # made only if a rate is missing
    for rate in (rate for rate in spec.rates if str(rate) not in done):
        (p, q), held_out = samples()
        torch.manual_seed(spec.seed)
        critic = models.build(
            "critic", conv=spec.conv, width=spec.width, kernel_size=spec.kernel_size, classes=1,
            in_channels=p.shape[1], image_size=tuple(p.shape[2:]),
        ).to(device)  # fmt: skip
        recipe = CriticRecipe(**{**spec.recipe, "lr": rate, "seed": spec.seed})
        with contextlib.suppress(TrainingError), quiet_bar(f"{spec.conv}, {rate}", recipe.steps) as bar:
            done[str(rate)] = None  # the rate is too high, unless it succeeds
            figures = wasserstein_distance(
                critic, p, q, recipe, held_out=held_out, on_step=lambda step, _: bar.update(step - bar.n)
            )
            done[str(rate)] = figures._asdict()
        write_atomically(path, json.dumps(done).encode())
    estimates = {rate: done[str(rate)] for rate in spec.rates}
    by_rate = {str(rate): e and e["distance"] for rate, e in estimates.items()}
    best = max(((e["distance"], e["lipschitz"]) for e in estimates.values() if e), default=(-math.inf, math.nan))
    if math.isinf(best[0]):
        raise TrainingError(f"every learning rate of {list(spec.rates)} was too high")
    share = {"share": 100 * best[0] / spec.shift} if spec.other == "shift" else {}
    return {"distance": best[0], "lipschitz": best[1], "by_rate": by_rate, **share}


def _digest_of_images(training: Split, test: Split) -> str:
    """Return what tells the images of a folder from those of another one."""
    return sha256({"training": training.images, "test": test.images})[:16]


def _samples(
    spec: CriticSpec, runs: Path, training: Split, test: Split, source: str, device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return two samples to train on and, for a generator, two others to report the distance of.

    The file of the generator is named by `source`, where the images are from.
    """
    p = training.images[: spec.examples]
    if spec.other == "shift":
        v = torch.randn(p.shape[1:], generator=torch.Generator().manual_seed(spec.seed))
        return (p + v * (spec.shift / v.norm()), p), None
    recipe = GeneratorSpec(**spec.generator)
    name = "-".join(str(v) for v in asdict(recipe).values())
    path = runs / "generators" / f"{source}-{name}.safetensors"
    make = trained_generator(recipe, training.images, path, device)
    held = test.images[: spec.examples]
    q, unseen = (samples_of(make, recipe.latent, n, spec.seed + k) for k, n in ((1, len(p)), (2, len(held))))
    return (p, q), (held, unseen)
