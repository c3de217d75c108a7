"""The Wasserstein distance by its dual: a 1-Lipschitz critic separates the means of two samples (Appendix D.2)."""

__all__ = ["CriticRecipe", "WassersteinEstimate", "wasserstein_distance"]

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.certificates.bounds import growth
from orthoconv.certificates.double import in_double
from orthoconv.data.batching import generator
from orthoconv.devices import in_double_near, in_reach_of_double, move
from orthoconv.linalg import row_norms
from orthoconv.modules import in_eval_mode, zeros_for
from orthoconv.train.metering import Meter

_CHUNK = 500
_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class CriticRecipe:
    """How to train a critic: by RMSprop, with a learning rate that decays exponentially.

    Attributes:
        steps: Steps, each on a batch of both samples.
        batch_size: Images of each sample in a step.
        lr: Learning rate at the start.
        decay: Learning rate at the end, relative to the start.
        seed: Seed of the batches.

    >>> CriticRecipe(steps=100, lr=0.01).batch_size
    64
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
    """A lower bound on the distance between two samples, and the Lipschitz bound of the critic.

    Attributes:
        distance: Lower bound on the Wasserstein distance.
        lipschitz: Lipschitz bound of the critic.

    >>> WassersteinEstimate(distance=4.9, lipschitz=1.0).distance
    4.9
    """

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
    any critic, however it was trained. The means are computed by `in_double`, and the bound is smaller by the
    `rounding_bound` of that computation.

    Arguments:
        critic: Function of images to one number each, whose layers have a rule; see `register_rule`.
        p: Sample (n, c, h, w), on any device.
        q: Sample (m, c, h, w).
        recipe: How to train the critic.
        held_out: Two other samples of the same distributions and shape, whose distance is reported; by default p and q.
        on_step: Called with the number of a step and the difference of its batch; on a CPU after each step, on an
            accelerator every `budget.READ_EVERY` steps.

    >>> from orthoconv.nn import CayleyLinear
    >>> p, q = torch.zeros(64, 4), torch.ones(64, 4)  # at the distance 2
    >>> _ = torch.manual_seed(0)
    >>> estimate = wasserstein_distance(CayleyLinear(4, 1), p, q, CriticRecipe(steps=50, lr=0.1))
    >>> 1.9 < estimate.distance <= 2
    True
    """
    reported = held_out or (p, q)
    _check(critic, p, q, *reported)
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
    return _estimate(critic, *reported)


def _check(critic: nn.Module, *samples: Tensor) -> None:
    """Raise an error unless the samples have one shape, and the critic has a bound and one output for each image."""
    if len(shapes := {tuple(s.shape[1:]): None for s in samples}) > 1:
        raise ValueError(f"all samples need the same shape, got {' and '.join(map(str, shapes))}")
    if empty := [tuple(s.shape) for s in samples if not len(s)]:
        raise ValueError(f"each sample needs an image at least, got one of shape {empty[0]}")
    (shape,) = shapes
    with torch.no_grad(), in_eval_mode(critic):
        value = critic(zeros_for(critic, shape))
        if value.numel() != 1:
            raise ValueError(
                f"a critic has one output for each image, such as models.build(..., classes=1), "
                f"got one with {value.numel()} outputs"
            )
        growth(critic, shape, torch.float64).error(0.0)


@torch.no_grad()
def _estimate(critic: nn.Module, p: Tensor, q: Tensor) -> WassersteinEstimate:
    """Return the difference of the means over p and q divided by the bound of the critic, rounded down."""
    near = in_reach_of_double(critic)
    grown, exact = growth(near, p.shape[1:], torch.float64), in_double(near)
    values, errors = [0.0, 0.0], 0.0
    for k, sample in enumerate((p, q)):
        parts = [in_double_near(part) for part in sample.split(_CHUNK)]
        values[k] = math.fsum(v for x in parts for v in exact(*move(exact, x)).flatten().cpu().tolist()) / len(sample)
        errors += math.fsum(e for x in parts for e in grown.error(row_norms(x)).cpu().tolist()) / len(sample)
    slack = errors + 4 * _EPS * (abs(values[0]) + abs(values[1]) + errors)  # of these lines themselves
    distance = (values[0] - values[1] - slack) / grown.lipschitz
    return WassersteinEstimate(distance - 4 * _EPS * abs(distance), grown.lipschitz)


def _placed(model: nn.Module, *samples: Tensor) -> tuple[Tensor, ...]:
    """Return samples on the device of the model, if they fit there beside it."""
    fit = sum(s.numel() * s.element_size() for s in samples) <= budget.DATA_BYTES
    return move(model, *samples) if fit else samples
