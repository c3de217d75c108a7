"""How a network is trained, as data."""

__all__ = ["YOUNGER", "Recipe"]

import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Literal

from orthoconv.train.objectives import OBJECTIVES, Constants, LossName
from orthoconv.train.schedule import SCHEDULES

YOUNGER = {"schedule": "triangular", "shift": 4, "precision": "float32", "compile": False, "flip": True}
YOUNGER |= {"optimizer": "adam"}
"""Fields that older records and checkpoints lack, and the value that they then had."""

_FIRST_SHARE = 0.1  # of eps0, at the beginning of a run whose eps grows
_PRECISIONS: Collection[str] = ("float32", "bf16")
_OPTIMIZERS: Collection[str] = ("adam", "muon")


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: Passes over the data.
        batch_size: Images in a step, over all processes.
        lr: Highest learning rate.
        loss: One of `orthoconv.train.OBJECTIVES`. "hinge", "hkr" and "soft_hkr" ask for the margin below; "emma",
            "gloro", "vra" and "radius_cross_entropy" for the radius eps0; "certificate" for the largest radius.
        eps0: Radius for which the loss asks for a certificate.
        margin_factor: Factor of the margin, margin_factor * lipschitz * eps0: 1 in the released code, sqrt(2) in the
            paper.
        lipschitz: Lipschitz bound in the margin. By default that of the network, if `orthoconv train` builds it, and
            otherwise 1.
        augment: Whether to move images by up to `shift` pixels and, if `flip`, to mirror half of them.
        project_every: Steps between the projections of layers that have a method `project`; also after each epoch.
        checkpoint_every: Steps between checkpoints; 0 for one after each epoch, and after three minutes without one.
        seed: Seed of the weights, the order of the images and the augmentation.
        offset: Lead that the losses "offset_cross_entropy" and "logit_annealing" ask of the true class.
        temperature: Number that these losses and "tau_cross_entropy" divide logits by; radii in
            "radius_cross_entropy".
        alpha: Weight of the hinge in the losses "hkr" and "soft_hkr", from 0 to 1.
        beta: Exponent of the loss "logit_annealing".
        gamma: Weight of the radius in the losses "certificate" and "vra".
        eps_rise: Share of the run over which the radius of the loss "emma" grows from a tenth of eps0 to eps0.
        schedule: Learning rate over the run: "triangular" as in the paper, or "linear", a short rise and a long fall.
        shift: Largest shift of the augmentation, in pixels.
        precision: "float32"; or "bf16", in which plain layers, activations and the products of linear layers compute.
            Operators, convolutions of this library and weights are float32 in either case.
        compile: Whether torch.compile translates the network, which takes minutes and changes the rounding.
        flip: Whether the augmentation mirrors images.
        optimizer: "adam", or "muon" (`orthoconv.train.Muon`), which learns more in an epoch.

    >>> Recipe(epochs=30, loss="offset_cross_entropy").batch_size
    256
    """

    epochs: int = 10
    batch_size: int = 256
    lr: float = 0.01
    loss: LossName = "hinge"
    eps0: float = 0.5
    margin_factor: float = 1.0
    lipschitz: float | None = None
    augment: bool = True
    project_every: int = 100
    checkpoint_every: int = 0
    seed: int = 0
    offset: float = 0.4
    temperature: float = 0.25
    alpha: float = 0.9
    beta: float = 5.0
    gamma: float = 0.1
    eps_rise: float = 0.5
    schedule: Literal["triangular", "linear"] = "triangular"
    shift: int = 4
    precision: Literal["float32", "bf16"] = "float32"
    compile: bool = False
    flip: bool = True
    optimizer: Literal["adam", "muon"] = "adam"

    def __post_init__(self) -> None:
        counts = {"epochs": 1, "batch_size": 1, "project_every": 1, "checkpoint_every": 0, "shift": 0}
        for name, least in counts.items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")
        bound = () if self.lipschitz is None else ("lipschitz",)
        for name in ("lr", "eps0", "margin_factor", "temperature", *bound):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        for name in ("offset", "beta", "gamma"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
                raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")
        for name in ("alpha", "eps_rise", *(("gamma",) if self.loss == "vra" else ())):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value!r}")
        names: dict[str, Collection[str]]
        names = {"loss": OBJECTIVES, "schedule": SCHEDULES, "precision": _PRECISIONS, "optimizer": _OPTIMIZERS}
        for name, accepted in names.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
        for name in ("augment", "compile", "flip"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int of 64 bits, got {self.seed!r}")

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that the weights depend on; runs are the same run if these are equal.

        Fields that only another loss needs are left out, and younger fields that have their default. Records and
        checkpoints of older versions do not have them.
        """
        special = {name for objective in OBJECTIVES.values() for name in objective.fields}
        unused = {"checkpoint_every", *(special - set(OBJECTIVES[self.loss].fields))}
        unused |= {name for name, default in YOUNGER.items() if getattr(self, name) == default}
        return {name: value for name, value in asdict(self).items() if name not in unused}

    def constants(self, progress: float) -> Constants:
        """Return the constants of the loss after the share `progress` of a run."""
        eps, lipschitz = self.eps0, self.lipschitz or 1.0
        if self.loss == "emma" and progress < self.eps_rise:
            eps *= _FIRST_SHARE + (1 - _FIRST_SHARE) * progress / self.eps_rise
        margin = self.margin_factor * lipschitz * self.eps0
        return Constants(eps, margin, lipschitz, self.offset, self.temperature, self.alpha, self.beta, self.gamma)
