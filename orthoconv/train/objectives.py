"""The losses that a recipe can name, and the constants that each has."""

__all__ = ["OBJECTIVES", "Constants", "LossName", "Objective"]

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from orthoconv.train import losses

LossName = Literal[
    "hinge", "cross_entropy", "offset_cross_entropy", "tau_cross_entropy", "logit_annealing", "emma", "gloro", "vra",
    "radius_cross_entropy", "certificate", "hkr", "soft_hkr",
]  # fmt: skip


class Constants(NamedTuple):
    """Numbers that losses depend on, at one step of a run; the fields of `Recipe` say what they are."""

    eps: float
    margin: float
    lipschitz: float
    offset: float
    temperature: float
    alpha: float
    beta: float
    gamma: float


class Objective(NamedTuple):
    """A loss by its name.

    Attributes:
        loss: Function of logits, labels, constants, and the pairwise constants of the model, if it has any.
        fields: Fields of `Recipe` that this loss needs and that not all losses have.
        pairwise: Whether it uses the pairwise constants.
    """

    loss: Callable[[Tensor, Tensor, Constants, Tensor | None], Tensor]
    fields: tuple[str, ...] = ()
    pairwise: bool = False


OBJECTIVES: dict[str, Objective] = {
    "hinge": Objective(lambda y, t, c, _: losses.hinge_loss(y, t, c.margin)),
    "cross_entropy": Objective(lambda y, t, c, _: F.cross_entropy(y, t)),
    "offset_cross_entropy": Objective(
        lambda y, t, c, _: losses.offset_cross_entropy(y, t, c.offset, c.temperature), ("offset", "temperature")
    ),
    "tau_cross_entropy": Objective(
        lambda y, t, c, _: losses.tau_cross_entropy(y, t, 1 / c.temperature), ("temperature",)
    ),
    "logit_annealing": Objective(
        lambda y, t, c, _: losses.logit_annealing(y, t, c.offset, c.temperature, c.beta),
        ("offset", "temperature", "beta"),
    ),
    "emma": Objective(lambda y, t, c, p: losses.emma_loss(y, t, c.eps, p, c.lipschitz), ("eps_rise",), pairwise=True),
    "gloro": Objective(lambda y, t, c, p: losses.gloro_loss(y, t, c.eps, p, c.lipschitz), pairwise=True),
    "vra": Objective(
        lambda y, t, c, p: losses.vra_loss(y, t, c.eps, c.gamma, p, c.lipschitz), ("gamma",), pairwise=True
    ),
    "radius_cross_entropy": Objective(
        lambda y, t, c, p: losses.radius_cross_entropy(y, t, c.eps, c.temperature, p, c.lipschitz),
        ("temperature",),
        pairwise=True,
    ),
    "certificate": Objective(
        lambda y, t, c, p: losses.regularized_cross_entropy(y, t, c.gamma, p, c.lipschitz), ("gamma",), pairwise=True
    ),
    "hkr": Objective(lambda y, t, c, _: losses.hkr_loss(y, t, c.alpha, c.margin), ("alpha",)),
    "soft_hkr": Objective(lambda y, t, c, _: losses.soft_hkr_loss(y, t, c.alpha, c.margin), ("alpha",)),
}
"""Losses that a recipe can name.

>>> "offset_cross_entropy" in OBJECTIVES
True
"""
