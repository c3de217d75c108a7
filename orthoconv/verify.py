"""Whether a model is what it says: the norm of each layer as it runs, the bound of the whole, the rounding."""

__all__ = ["Layer", "Verification", "verify"]

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orthoconv.linalg import row_norms
from orthoconv.lipschitz import empirical_lipschitz, lipschitz_bound
from orthoconv.nn import RKOConv2d
from orthoconv.nn.base import BaseConv2d
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.memory import frozen
from orthoconv.rounding import growth, in_double
from orthoconv.tracing import calls, in_eval_mode

TOLERANCE = 1e-5  # by which singular values may miss 1, and a forward pass its operator, in float32
_VISIBLE = 1e-3  # by which the ratio of two distances in float32 may be off
_PROBES = 4
_ATTACKED = 16


@dataclass(frozen=True)
class Layer:
    """A linear layer as it runs on inputs of one shape."""

    name: str
    kind: str
    shape: tuple[int, ...]
    claim: str
    largest: float
    smallest: float | None
    difference: float

    @property
    def faults(self) -> list[str]:
        """What is wrong with it."""
        found = []
        if self.claim and self.largest > 1 + TOLERANCE:
            found.append(f"{self.name} ({self.kind}) says that it is {self.claim}, and has norm {self.largest:.9g}")
        if self.claim == "orthogonal" and self.smallest is not None and self.smallest < 1 - TOLERANCE:
            found.append(
                f"{self.name} ({self.kind}) says that it is orthogonal, and has a singular value {self.smallest:.9g}"
            )
        if not self.difference <= TOLERANCE:
            found.append(
                f"{self.name} ({self.kind}) does not compute what its operator says: it differs by "
                f"{self.difference:.3g} of what is computed"
            )
        return found


@dataclass(frozen=True)
class Verification:
    """What was found out about a model; it is sound if there are no faults.

    `empirical` is the largest ratio of distances that ascent found, `slack` the largest difference of logits to those
    of exact arithmetic, on the inputs that were given, and `worst` what rounding could make of them, in any order.
    """

    layers: list[Layer]
    lipschitz: float
    claimed: float | None
    empirical: float
    slack: float
    worst: float

    @property
    def faults(self) -> list[str]:
        """What is wrong, one sentence each."""
        found = [fault for layer in self.layers for fault in layer.faults]
        if self.claimed is not None and self.lipschitz > self.claimed * (1 + TOLERANCE) ** max(1, len(self.layers)):
            found.append(f"the bound of the model is {self.lipschitz:.9g}, more than the {self.claimed:.9g} it claims")
        if not self.empirical <= self.lipschitz * (1 + _VISIBLE):
            found.append(f"logits move {self.empirical:.6g} times as far as inputs, beyond {self.lipschitz:.9g}")
        if not self.slack <= self.worst:
            found.append(f"logits are off by {self.slack:.3g}, where rounding explains {self.worst:.3g}")
        return found


@torch.no_grad()
def verify(model: nn.Module, x: Tensor, claimed: float | None = None) -> Verification:
    """Look at each linear layer of `model`, at the sizes at which `x` passes through it, and at the whole.

    The norm of a layer is that of its operator in its own precision, found in float64 from all its frequencies; and
    its forward pass is compared with that operator on random inputs, so that neither can hide behind the other.

    Arguments:
        model: Made of layers that have a rule; see `register_lipschitz_rule`. It is used in eval mode.
        x: Some inputs (b, ...).
        claimed: Lipschitz constant that the model should have, if any.

    >>> from orthoconv.nn import CayleyLinear
    >>> verify(nn.Sequential(nn.Flatten(), CayleyLinear(16, 4)), torch.rand(8, 1, 4, 4), claimed=1.0).faults
    []
    """
    with in_eval_mode(model), frozen(model):
        layers = [_look(name, m, y) for name, m, y in calls(model, x[:1].clone()) if isinstance(m, _LINEAR)]
        norm = float(row_norms(x).max())
        difference = row_norms(model(x.clone()).double() - in_double(model)(x.double().clone()))
        found = empirical_lipschitz(model, x[:_ATTACKED], max(1.0, norm) / 50, bounds=None)
        return Verification(
            layers,
            lipschitz_bound(model, x.shape[1:]),
            claimed,
            float(found.max()),
            float(difference.max()),
            growth(model, x.shape[1:], x.dtype).error(norm),
        )


_LINEAR = (BaseConv2d, BaseLinear, nn.Linear, nn.Conv2d)


def _look(name: str, layer: nn.Module, x: Tensor) -> Layer:
    shape = tuple(x.shape[1:])
    probes = torch.randn(_PROBES, *shape, generator=torch.Generator().manual_seed(0)).to(x)
    y, exact = layer(probes).double(), in_double(layer)(probes.double())
    gain, constant = lipschitz_bound(layer, shape), row_norms(layer(torch.zeros_like(probes[:1])).double())
    difference = row_norms(y - exact) / (max(1.0, gain) * row_norms(probes.double()) + constant)
    return Layer(
        name or "model", type(layer).__name__, shape, _claim(layer), gain,
        _smallest(layer, shape), float(difference.max()),
    )  # fmt: skip


def _claim(layer: nn.Module) -> str:
    if isinstance(layer, BaseLinear) or (isinstance(layer, BaseConv2d) and layer.orthogonal and not layer._is_cropped):
        return "orthogonal"
    return "1-Lipschitz" if isinstance(layer, RKOConv2d) or getattr(layer, "orthogonal", False) else ""


def _smallest(layer: nn.Module, shape: tuple[int, ...]) -> float | None:
    """Smallest singular value; None where a border makes it another matrix for each pixel."""
    if isinstance(layer, BaseConv2d):
        return None if layer._is_cropped else float(layer.singular_values((shape[-2], shape[-1])).min())
    if isinstance(layer, nn.Conv2d):
        return None
    matrix = layer.recall() if isinstance(layer, BaseLinear) else layer.weight
    assert isinstance(matrix, Tensor)
    return float(torch.linalg.svdvals(matrix.double()).min())
