"""Check a model against what its layers promise: norms as they run, the bound of the whole, the rounding."""

__all__ = ["LayerFacts", "Verification", "singular_values", "verify"]

import html
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orthoconv.attacks.empirical import empirical_lipschitz
from orthoconv.certificates.bounds import Walk
from orthoconv.certificates.display import table
from orthoconv.certificates.double import in_double, require_all_double
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.devices import in_double_near, in_reach_of_double, move
from orthoconv.linalg import row_norms
from orthoconv.modules import in_eval_mode, leaf_inputs, require_number, uncompiled
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.reparametrized import Reparametrized, frozen

TOLERANCE = 1e-5  # by which singular values may miss 1, and a forward pass its operator, in float32
_VISIBLE = 1e-6  # by which the ratio of two distances in float64 may be off
_PROBES = 4
_ATTACKED = 16


@dataclass(frozen=True)
class LayerFacts:
    """A linear layer as it runs on inputs of one shape.

    Attributes:
        name: Name of the layer in the model.
        kind: Name of its class.
        shape: Shape of one input.
        promise: What the layer promises: "orthogonal", "nonexpansive", or None.
        largest: Largest singular value of its operator.
        smallest: Smallest one, or None where a border makes it another matrix for each pixel.
        difference: Relative difference of the forward pass and the operator, on random inputs.

    >>> LayerFacts("head", "CayleyLinear", (16,), "orthogonal", 1.5, 1.0, 0.0).faults
    ['head (CayleyLinear) promises to be orthogonal, but its norm is 1.5']
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    promise: Guarantee | None
    largest: float
    smallest: float | None
    difference: float

    @property
    def faults(self) -> list[str]:
        """What is wrong with the layer, one sentence each."""
        layer, faults = f"{self.name} ({self.kind})", []
        if self.promise and self.largest > 1 + TOLERANCE:
            faults.append(f"{layer} promises to be {self.promise}, but its norm is {self.largest:.9g}")
        if self.promise == "orthogonal" and self.smallest is not None and self.smallest < 1 - TOLERANCE:
            faults.append(f"{layer} promises to be orthogonal, but has a singular value {self.smallest:.9g}")
        if not self.difference <= TOLERANCE:
            faults.append(
                f"{layer} does not compute its operator: the outputs differ by {self.difference:.3g} of their size"
            )
        return faults


@dataclass(frozen=True)
class Verification:
    """What was found out about a model; it is sound if there are no faults.

    Attributes:
        layers: Facts about each linear layer.
        lipschitz: Lipschitz bound of the model.
        claimed: Lipschitz constant that the model should have, or None.
        empirical: Largest ratio of distances that ascent found, with the operators of the model, in float64.
        slack: Largest difference of the logits to those of exact arithmetic, on the inputs that were given.
        worst: What rounding could make of the logits, with sums in the worst order.

    >>> from orthoconv.nn import CayleyLinear
    >>> found = verify(CayleyLinear(16, 4), torch.rand(8, 16))
    >>> len(found.layers), found.faults
    (1, [])
    >>> found  # doctest: +ELLIPSIS
    Verification(verified, 1 layers, Lipschitz bound 1...)
    """

    layers: list[LayerFacts]
    lipschitz: float
    claimed: float | None
    empirical: float
    slack: float
    worst: float

    @property
    def faults(self) -> list[str]:
        """What is wrong, one sentence each."""
        faults = [fault for layer in self.layers for fault in layer.faults]
        if self.claimed is not None and self.lipschitz > self.claimed * (1 + TOLERANCE) ** max(1, len(self.layers)):
            faults.append(f"the Lipschitz bound is {self.lipschitz:.9g}, but the model claims {self.claimed:.9g}")
        if not self.empirical <= self.lipschitz * (1 + _VISIBLE):
            faults.append(f"logits move {self.empirical:.6g} times as far as inputs, beyond {self.lipschitz:.9g}")
        if not self.slack <= self.worst:
            faults.append(f"logits are off by {self.slack:.3g}, but rounding explains only {self.worst:.3g}")
        return faults

    def __repr__(self) -> str:
        said = f"{len(self.faults)} faults: {'; '.join(self.faults)}" if self.faults else "verified"
        return f"Verification({said}, {len(self.layers)} layers, Lipschitz bound {self.lipschitz:.9g})"

    def _repr_html_(self) -> str:
        """Show the layers and the faults, in a notebook."""
        header = ("layer", "kind", "promise", "largest", "smallest", "forward pass off by")
        rows = [
            (f.name, f.kind, f.promise or "none", f"{f.largest:.8g}", "" if f.smallest is None else f"{f.smallest:.8g}",
             f"{f.difference:.1e}")
            for f in self.layers
        ]  # fmt: skip
        return f"<p>{html.escape(repr(self))}</p>{table(header, rows)}"


@torch.no_grad()
def verify(model: nn.Module, x: Tensor, claimed: float | None = None) -> Verification:
    """Check each linear layer of `model`, at the sizes at which `x` passes through it, and the whole.

    The norm of a layer is that of its operator in its own precision, found in float64 from all its frequencies. Its
    forward pass is compared with that operator on random inputs, so that neither can hide behind the other.

    Arguments:
        model: Made of layers that have a rule; see `register_rule`. It is used in eval mode.
        x: Some inputs (b, ...), on any device.
        claimed: Lipschitz constant that the model should have, if any.

    >>> from orthoconv.nn import CayleyLinear
    >>> verify(nn.Sequential(nn.Flatten(), CayleyLinear(16, 4)), torch.rand(8, 1, 4, 4), claimed=1.0).faults
    []
    """
    model = unwrapped(model)
    if claimed is not None:
        require_number("claimed", claimed)
    (x,) = move(model, _some_inputs(x))
    with in_eval_mode(model), frozen(model):
        walk = Walk(x.dtype)
        grown = walk.growth(model, x.shape[1:])
        leaves = leaf_inputs(uncompiled(model), x[:1].clone())
        layers = [_look(*leaf, walk) for leaf in leaves if isinstance(leaf.module, _LINEAR)]
        exact, near = in_double(model), in_double_near(x)
        require_all_double(exact, x[:1])
        norm = float(row_norms(near).max())
        difference = _difference(model, exact, x)
        ratios = empirical_lipschitz(exact, near[:_ATTACKED], max(1.0, norm) / 50, bounds=None)
        slack, worst = float(difference.max()), grown.error(norm)
        return Verification(layers, grown.lipschitz, claimed, float(ratios.max()), slack, worst)


def _some_inputs(x: object) -> Tensor:
    """Return `x` if it is a batch of inputs, or raise an error that says what is missing."""
    if isinstance(x, Tensor) and x.ndim > 0 and len(x) and x.is_floating_point():
        return x
    given = f"a tensor of {x.dtype} and shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
    raise TypeError(
        f"verify takes some inputs (b, ...) of floating point, on which rounding is measured, got {given}; for a shape "
        f"alone give torch.rand(8, *shape), or call lipschitz_bound(model, shape)"
    )


_LINEAR = (Reparametrized, nn.Linear, nn.Conv1d, nn.Conv2d)


def _look(name: str, layer: nn.Module, x: Tensor, walk: Walk) -> LayerFacts:
    shape = tuple(x.shape[1:])
    probes = torch.randn(_PROBES, *shape, generator=torch.Generator().manual_seed(0)).to(x)
    gain, constant = walk.growth(layer, shape).lipschitz, float(row_norms(layer(torch.zeros_like(probes[:1]))))
    error = _difference(layer, in_double(layer), probes)
    difference = error / (max(1.0, gain) * row_norms(probes).to(error) + constant)
    promise, values = layer.promise if isinstance(layer, Reparametrized) else None, singular_values(layer, shape)
    smallest = None if values is None else float(values.min())
    return LayerFacts(name or "model", type(layer).__name__, shape, promise, gain, smallest, float(difference.max()))


def _difference(model: nn.Module, exact: nn.Module, x: Tensor) -> Tensor:
    """Norms (b,) in float64 of what `model` computes minus what `exact`, its copy in float64, does."""
    y, near = in_double_near(model(x.clone())), in_double_near(x)
    return row_norms(y - exact(near.clone()))


def singular_values(layer: nn.Module, shape: Sequence[int]) -> Tensor | None:
    """Singular values of a linear layer, in float64; None where a border makes it another matrix for each pixel.

    Arguments:
        layer: Layer of this library, or `nn.Linear`.
        shape: Shape of one input, without the batch.

    >>> singular_values(nn.Linear(3, 2), (3,)).shape
    torch.Size([2])
    """
    layer = in_reach_of_double(layer)
    if isinstance(layer, Reparametrized):
        return layer.singular_values_for(shape)
    if isinstance(layer, nn.Linear):
        values: Tensor = torch.linalg.svdvals(layer.weight.detach().double())
        return values
    return None
