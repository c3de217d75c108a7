"""The Wasserstein distance by its dual: a 1-Lipschitz critic separates the means of two samples (Appendix D.2)."""

__all__ = ["CriticRecipe", "WassersteinEstimate", "wasserstein_distance"]

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.certificates import lipschitz_bound
from orthoconv.data.batching import generator
from orthoconv.devices import move
from orthoconv.train.metering import Meter

_CHUNK = 500


@dataclass(frozen=True)
class CriticRecipe:
    """How to train a critic: by RMSprop, with a learning rate that decays exponentially.

    Attributes:
        steps: Steps, each on a batch of both samples.
        batch_size: Images of each sample in a step.
        lr: Learning rate at the start.
        decay: Learning rate at the end, relative to the start.
        seed: Seed of the batches.
    """

    steps: int = 1000
    batch_size: int = 64
    lr: float = 1e-3
    decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")


class WassersteinEstimate(NamedTuple):
    """A lower bound on the distance between two samples, and the Lipschitz bound of the critic."""

    distance: float
    lipschitz: float


def wasserstein_distance(
    critic: nn.Module,
    p: Tensor,
    q: Tensor,
    recipe: CriticRecipe = CriticRecipe(),  # noqa: B008
    *,
    held_out: tuple[Tensor, Tensor] | None = None,
    on_step: Callable[[int, float], object] | None = None,
) -> WassersteinEstimate:
    r"""Train `critic` in place, and return a lower bound on the 1-Wasserstein distance between the samples `p` and `q`.

    .. math:: W_1(P, Q) = \sup_{\mathrm{Lip}(f) \le 1} E f(P) - E f(Q)

    The bound is the difference of the critic's means over both samples, divided by its Lipschitz bound. It holds for
    any critic, however it was trained.

    Arguments:
        critic: Function of images to one number each, which `lipschitz_bound` can bound.
        p: Sample (n, c, h, w), on any device.
        q: Sample (m, c, h, w).
        recipe: How to train the critic.
        held_out: Two other samples of the same distributions, whose distance is reported; by default p and q.
        on_step: Called with the number of a step and the difference of its batch; on a CPU after each step, on an
            accelerator every `budget.READ_EVERY` steps.
    """
    if p.shape[1:] != q.shape[1:]:
        raise ValueError(f"both samples need the same shape, got {tuple(p.shape[1:])} and {tuple(q.shape[1:])}")
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=recipe.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, recipe.decay ** (1 / recipe.steps))
    meter, (p, q) = Meter(critic, [0.0], "difference"), _placed(critic, p, q)
    critic.train()
    for step in range(recipe.steps):
        source = generator(recipe.seed, 0, step)
        chosen = (s[torch.randint(len(s), (recipe.batch_size,), generator=source).to(s.device)] for s in (p, q))
        x, y = move(critic, *chosen)
        gain = critic(x).mean() - critic(y).mean()
        optimizer.zero_grad()
        (-gain).backward()
        meter.check(step + 1, gain)
        optimizer.step()
        schedule.step()
        if meter.is_due(step + 1) or step + 1 == recipe.steps:
            meter.read()
            if on_step is not None:
                on_step(step + 1, gain.item())
    for module in critic.modules():
        if callable(project := getattr(module, "project", None)):
            project()
    critic.eval()
    bound = lipschitz_bound(critic, p.shape[1:])
    p, q = held_out or (p, q)
    return WassersteinEstimate((_mean(critic, p) - _mean(critic, q)) / bound, bound)


@torch.no_grad()
def _mean(f: nn.Module, x: Tensor) -> float:
    """Return the mean of f over all of x, in float64."""
    return sum(float(f(*move(f, part)).cpu().double().sum()) for part in x.split(_CHUNK)) / len(x)


def _placed(model: nn.Module, *samples: Tensor) -> tuple[Tensor, ...]:
    """Return samples on the device of the model, if they fit there beside it."""
    fit = sum(s.numel() * s.element_size() for s in samples) <= budget.DATA_BYTES
    return move(model, *samples) if fit else samples
