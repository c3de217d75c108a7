"""Certificates of robustness in the l2 norm (Section 3; Tsuzuku et al., 2018), rounding included."""

__all__ = ["EPS", "Certificates", "certified_radius", "certify"]

import math
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.certificates.algebra import Growth
from orthoconv.certificates.arguments import iterable, norms, pair_of, require_input
from orthoconv.certificates.bounds import Walk
from orthoconv.certificates.branches import Branch, branches_of, require_sum
from orthoconv.certificates.display import curve, in_levels, table
from orthoconv.certificates.double import in_double, require_all_double
from orthoconv.certificates.downward import certain, rounded_down
from orthoconv.certificates.heads import pairwise_radius, pairwise_rates, pairwise_reach
from orthoconv.certificates.local import levels_at, levels_by, proven_radius
from orthoconv.certificates.own_forward import bounded_form, headed_form
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.devices import device_of, in_double_near, in_reach_of_double, move
from orthoconv.linalg import row_norms
from orthoconv.margins import check_labels, margin
from orthoconv.modules import in_eval_mode, require_module, require_number
from orthoconv.nn.reparametrized import frozen
from orthoconv.tracing import full_precision

EPS = (36 / 255, 72 / 255, 108 / 255, 1.0)
"""Norms of perturbations that `certify` reports on by default: those of the paper and its successors.

>>> EPS[0] == 36 / 255
True
"""
_TINY = sys.float_info.min  # in place of the bound 0 of a constant model, whose radius is the largest number


class Certificates(NamedTuple):
    """Facts about each example of a data set, and the bound they rest on.

    Attributes:
        logits: Outputs of the model, (b, classes).
        labels: True classes, (b,).
        radius: Distance within which no input has another class, (b,); 0 where the class is wrong or tied.
        lipschitz: Lipschitz bound of the logits.
        eps: Norms of perturbations that `certified_accuracy` reports on.
        slack: Bound of what rounding changed in the logits, in the l2 norm, (b,); the radius allows for it. None if
            `certify` was called with rounding=False.
        head: What the radius rests on: "pairwise", the bound of each pair of classes (see `pairwise_radius`), or
            "lipschitz", that of all logits together.
        by_lipschitz: Radii without local certificates, (b,); None if `certify` was called without local=True.

    >>> from orthoconv.nn import CayleyLinear
    >>> model, x = CayleyLinear(4, 3), torch.rand(5, 4)
    >>> found = certify(model, [(x, model(x).argmax(1))], eps=[0.1])
    >>> found.radius.shape, found.clean_accuracy
    (torch.Size([5]), 1.0)
    >>> found._replace(radius=torch.ones(5))
    Certificates(5 examples, 100.0% correct, certified 100.0% at 0.1)
    """

    logits: Tensor
    labels: Tensor
    radius: Tensor
    lipschitz: float
    eps: tuple[float, ...]
    slack: Tensor | None = None
    head: Literal["pairwise", "lipschitz"] = "lipschitz"
    by_lipschitz: Tensor | None = None

    @property
    def correct(self) -> Tensor:
        """Whether each example is classified correctly; a tie is not."""
        return margin(self.logits, self.labels) > 0

    @property
    def clean_accuracy(self) -> float:
        """Fraction of examples classified correctly."""
        return float(self.correct.double().mean())

    @property
    def certified_accuracy(self) -> dict[float, float]:
        """For each eps, the fraction of examples whose class no perturbation of norm eps changes."""
        return _shares(self.radius, self.eps)

    @property
    def certified_by_lipschitz(self) -> dict[float, float]:
        """The same without local certificates."""
        return _shares(self.radius if self.by_lipschitz is None else self.by_lipschitz, self.eps)

    def __repr__(self) -> str:
        at = ", ".join(f"{share:.1%} at {in_levels(eps)}" for eps, share in self.certified_accuracy.items())
        return f"Certificates({len(self.radius)} examples, {self.clean_accuracy:.1%} correct, certified {at})"

    def _repr_html_(self) -> str:
        """Show the accuracy by radius, in a notebook."""
        rows = [("0 (clean)", f"{self.clean_accuracy:.1%}")]
        rows += [(in_levels(eps), f"{share:.1%}") for eps, share in self.certified_accuracy.items()]
        about = f"{len(self.radius)} examples, Lipschitz bound {self.lipschitz:.9g}, radii by {self.head} bounds"
        return f"<p>{about}</p>{table(('radius', 'certified'), rows)}{curve(self.radius)}"


def certified_radius(logits: Tensor, labels: Tensor, lipschitz: float = 1.0, slack: Tensor | float = 0.0) -> Tensor:
    r"""Radius within which the class of each example cannot change (Section 3).

    .. math:: \frac{\max(0, y_t - \max_{i \ne t} y_i)}{\sqrt 2 L} - \frac{\eta}{L}

    It is computed in float64 and rounded down; it is 0 where a logit is not finite.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        lipschitz: Lipschitz constant L of the logits.
        slack: Bound :math:`\eta` of the l2 error of the logits, for each example or for all.

    >>> certified_radius(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1]))
    tensor([1.4142, 0.0000])
    """
    require_number("lipschitz", lipschitz)
    if not (math.isfinite(lipschitz) and lipschitz > 0):
        raise ValueError(f"lipschitz must be positive and finite, got {lipschitz!r}")
    given = torch.as_tensor(slack)
    if given.shape not in ((), labels.shape) or not bool((given >= 0).all()):
        raise ValueError(
            f"slack must be at least 0, one number or one for each of {tuple(labels.shape)} examples, got {slack!r}"
        )
    scores, less = in_double_near(logits), 1 - 8 * torch.finfo(torch.float64).eps
    error = in_double_near(given).to(scores.device) / less
    lead = margin(scores, labels.to(scores.device)) / math.sqrt(2) * less
    radius = certain((lead - error).clamp_min(0) / lipschitz * less, logits.to(scores.device))
    return rounded_down(radius, logits.dtype).to(logits.device)


@torch.no_grad()
def certify(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    eps: Sequence[float] | float = EPS,
    lipschitz: float | None = None,
    *,
    rounding: bool = True,
    local: bool | float = False,
) -> Certificates:
    """Certify all examples of `batches`, with the bound of `lipschitz_bound` unless another is given.

    A Lipschitz bound holds for exact arithmetic, but logits are computed in floating point. So `certify` computes each
    batch once more, by `in_double`. It reduces the radius of an example by the difference of its logits, and by the
    `rounding_bound` of the second computation. What is certified holds for the exact function.

    A model that ends in a linear layer, or in an `Ensemble` of such models, is certified by `pairwise_radius`, from the
    bound of the layers before it and the distances of the rows of its matrix. Such a radius is never smaller than that
    of `certified_radius`, and the last layer need not be orthogonal.

    With ``local=True``, `certify` looks again at each image whose radius lies between one half of an `eps` and that
    `eps`. It bounds how fast the logits approach each other near this image, which is slower than their Lipschitz
    constant allows (docs/maths.md). If that proves the class within eps, the radius becomes eps and a little more. This
    is for networks of affine layers and MaxMin, and for means of them. With ``local=0.05``, `certify` does not ask
    for the `eps`: it makes each radius larger by steps of 5 %, as far as that can be proven, up to twice the radius.

    Arguments:
        model: Function of images to logits; used in eval mode, and left in the mode it had. See `lipschitz_bound`.
        batches: Pairs of images and labels, on the device of the model or another, where the results will be.
        eps: Norms of perturbations to report on, or one of them.
        lipschitz: Lipschitz constant of the logits; by default `lipschitz_bound` for the shape of the images. With
            one that is given, radii are those of `certified_radius`.
        rounding: Whether to allow for rounding, which takes three times as long; without, the formulas are
            those of exact arithmetic.
        local: Whether to prove more by local certificates, at the `eps`; or the share of a step, such as 0.05. Needs
            rounding, and the bound of `lipschitz_bound`.

    >>> from orthoconv.nn import CayleyLinear
    >>> model, x = nn.Sequential(nn.Flatten(), CayleyLinear(16, 3)), torch.rand(5, 1, 4, 4)
    >>> certify(model, [(x, model(x).argmax(1))]).clean_accuracy
    1.0
    """
    require_module(model)
    eps = norms(eps)
    if lipschitz is not None:
        require_number("lipschitz", lipschitz)
    if not (isinstance(local, bool) or (isinstance(local, float) and 0 < local < 1)):
        raise ValueError(f"local must be True, False or a share of a radius such as 0.05, got {local!r}")
    if local and (lipschitz is not None or not rounding):
        raise ValueError(
            f"local needs rounding=True and no lipschitz, got rounding={rounding}, lipschitz={lipschitz!r}"
        )
    basis: _Basis | None = None
    parts: list[tuple[Tensor, ...]] = []
    precise = full_precision(torch.empty(0, device=device_of(model)))
    with torch.inference_mode(False), torch.no_grad(), in_eval_mode(model), frozen(model), precise:
        near = in_reach_of_double(unwrapped(model))
        for x, y in map(pair_of, iterable(batches)):
            basis = basis or _basis(near, x[:1], lipschitz, rounding, local)
            require_input(x, basis.shape)
            home = y.device if budget.has_double(y.device) else torch.device("cpu")
            (x,) = move(model, x)
            logits = model(x.clone())  # whose first layer may work in place
            check_labels(y, logits.shape[-1])
            slack = basis.slack(x, logits).to(home)
            scores, labels = logits.to(home), y.to(home).long()
            radius = basis.radius(scores, labels, slack)
            parts.append((scores, labels, radius, slack, basis.proven(x, logits, labels, slack, eps, local).to(home)))
    if basis is None:
        raise ValueError("certify needs at least one batch, got none")
    scores, labels, radius, slack, proven = map(torch.cat, zip(*parts, strict=True))
    longer = radius.maximum(rounded_down(proven, radius.dtype))
    rests_on: Literal["pairwise", "lipschitz"] = "lipschitz" if basis.rates is None else "pairwise"
    slacks, by_lipschitz = slack if rounding else None, radius if local else None
    return Certificates(scores, labels, longer, basis.lipschitz, eps, slacks, rests_on, by_lipschitz)


def _shares(radius: Tensor, eps: Sequence[float]) -> dict[float, float]:
    return {e: float((radius > e).double().mean()) for e in eps}


class _Basis(NamedTuple):
    """What certificates for inputs of one shape rest on.

    Attributes:
        shape: Shape of an input.
        lipschitz: Lipschitz bound of the logits.
        rates: Bounds of the differences of two logits, if the model ends in a linear layer.
        grown: How rounding errors grow in `exact`.
        exact: The model in float64; None if rounding is left out.
        branches: The model, taken apart for local certificates; empty without them.
    """

    shape: torch.Size
    lipschitz: float
    rates: Tensor | None
    grown: Growth | None
    exact: nn.Module | None
    branches: list[Branch]

    def slack(self, x: Tensor, logits: Tensor) -> Tensor:
        """Bound of the rounding error of each example: measured against `exact`, whose own error `grown` bounds."""
        if self.exact is None or self.grown is None:
            return logits.new_zeros(len(logits))
        x = in_double_near(x)
        slack: Tensor = row_norms(in_double_near(logits) - self.exact(x.clone())) + self.grown.error(row_norms(x))
        return slack.nan_to_num(nan=math.inf, posinf=math.inf)  # of logits that overflow nothing is known

    def radius(self, logits: Tensor, labels: Tensor, slack: Tensor) -> Tensor:
        """Radii by the Lipschitz bounds."""
        if self.exact is None:
            values, error = logits, logits.new_zeros(())
        else:
            values, error = logits.double(), slack
        radius = certified_radius(values, labels, self.lipschitz, error)
        if self.rates is not None:
            radius = radius.maximum(pairwise_radius(values, labels, self.rates.to(values.device), slack=error))
        return radius if self.exact is None else rounded_down(radius, logits.dtype)

    def proven(
        self, x: Tensor, logits: Tensor, labels: Tensor, slack: Tensor, eps: Sequence[float], local: bool | float
    ) -> Tensor:
        """Radii by local certificates, where those by the Lipschitz bounds are smaller; 0 elsewhere, in float64."""
        x, logits = in_double_near(x).clone(), in_double_near(logits)
        if not self.branches or self.grown is None or self.exact is None:
            return torch.zeros_like(logits[:, 0])
        require_sum(self.branches, self.exact, x[:1], self.grown.error)
        labels, slack, rates = labels.to(logits.device), slack.to(logits.device), self.rates
        if rates is None:  # no linear layer at the end: one rate for all pairs
            rates = logits.new_full((logits.shape[1],) * 2, math.sqrt(2) * (1 + 1e-15) * self.lipschitz)
        reach = pairwise_reach(logits, labels, rates, 1.0, slack)
        levels = levels_at(eps, reach[:, 0]) if local is True else levels_by(float(local), reach.amin(1))
        return proven_radius(self.branches, x, labels, reach, levels, self.grown.error)


def _basis(near: nn.Module, x: Tensor, lipschitz: float | None, rounding: bool, local: bool | float) -> _Basis:
    """Find out what certificates rest on, for inputs like the one of a batch `x` (1, ...)."""
    walk, shape, rates, grown = Walk(torch.float64), x.shape[1:], None, None
    form = bounded_form(near, shape) if rounding or lipschitz is None else near
    exact = _exact(form, x) if rounding else None
    if rounding or lipschitz is None:
        grown = walk.growth(near, shape)
    bound = partial(_bound, walk, shape)
    if lipschitz is None and grown is not None:
        lipschitz = max(grown.lipschitz, _TINY)
        rates = pairwise_rates(headed_form(form, shape), bound)
    assert lipschitz is not None
    branches = branches_of(form, exact, bound) if local and exact is not None else []
    return _Basis(shape, lipschitz, rates, grown, exact, branches)


def _exact(form: nn.Module, x: Tensor) -> nn.Module:
    """Copy a model to compute in float64, as it must on the first of some inputs."""
    exact = in_double(form)
    require_all_double(exact, *move(exact, x))
    return exact


def _bound(walk: Walk, shape: Sequence[int], part: nn.Module) -> float:
    return max(walk.growth(part, shape).lipschitz, _TINY)
