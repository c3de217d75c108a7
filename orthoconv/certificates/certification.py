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
from orthoconv.certificates.bounds import Walk
from orthoconv.certificates.display import curve, in_levels, table
from orthoconv.certificates.double import in_double
from orthoconv.certificates.downward import certain, rounded_down
from orthoconv.certificates.heads import pairwise_radius, pairwise_rates
from orthoconv.certificates.own_forward import bounded_form
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.devices import device_of, in_double_near, in_reach_of_double, move
from orthoconv.linalg import row_norms
from orthoconv.margins import check_labels, margin
from orthoconv.modules import in_eval_mode
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
        return {eps: float((self.radius > eps).double().mean()) for eps in self.eps}

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
) -> Certificates:
    """Certify all examples of `batches`, with the bound of `lipschitz_bound` unless another is given.

    A Lipschitz bound holds for exact arithmetic, but logits are computed in floating point. So `certify` computes each
    batch once more, by `in_double`. It reduces the radius of an example by the difference of its logits, and by the
    `rounding_bound` of the second computation. What is certified holds for the exact function.

    A model that ends in a linear layer, or in an `Ensemble` of such models, is certified by `pairwise_radius`, from the
    bound of the layers before it and the distances of the rows of its matrix. Such a radius is never smaller than that
    of `certified_radius`, and the last layer need not be orthogonal.

    Arguments:
        model: Function of images to logits; used in eval mode, and left in the mode it had. See `lipschitz_bound`.
        batches: Pairs of images and labels, on the device of the model or another, where the results will be.
        eps: Norms of perturbations to report on, or one of them.
        lipschitz: Lipschitz constant of the logits; by default `lipschitz_bound` for the shape of the images. With
            one that is given, radii are those of `certified_radius`.
        rounding: Whether to allow for rounding, which takes three times as long; without, the formulas are
            those of exact arithmetic.

    >>> from orthoconv.nn import CayleyLinear
    >>> model, x = nn.Sequential(nn.Flatten(), CayleyLinear(16, 3)), torch.rand(5, 1, 4, 4)
    >>> certify(model, [(x, model(x).argmax(1))]).clean_accuracy
    1.0
    """
    eps = (eps,) if isinstance(eps, int | float) else tuple(eps)
    if bad := [e for e in eps if not e >= 0]:
        raise ValueError(f"eps must be at least 0, got {bad[0]!r}")
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    slack: list[Tensor] = []
    shape: torch.Size | None = None
    rates, walk = None, Walk(torch.float64)
    with in_eval_mode(model), frozen(model), full_precision(torch.empty(0, device=device_of(model))):
        near, exact = in_reach_of_double(unwrapped(model)), None
        for x, y in batches:
            if shape is None:
                shape = x.shape[1:]
                form = bounded_form(near, shape) if rounding or lipschitz is None else near
                exact = in_double(form) if rounding else None
                grown = walk.growth(near, shape) if rounding or lipschitz is None else None
                if lipschitz is None and grown is not None:
                    lipschitz = max(grown.lipschitz, _TINY)
                    rates = pairwise_rates(form, partial(_bound, walk, shape))
            if x.shape[1:] != shape:
                raise ValueError(f"certify takes inputs of one shape, got {tuple(x.shape[1:])} after {tuple(shape)}")
            if not bool(torch.isfinite(x).all()):
                raise ValueError(
                    f"certify takes finite inputs, got {int((~torch.isfinite(x)).sum())} entries that are not"
                )
            home = y.device if budget.has_double(y.device) else torch.device("cpu")
            (x,) = move(model, x)
            computed = model(x.clone())  # whose first layer may work in place
            logits.append(computed.to(home))
            check_labels(y, computed.shape[-1])
            labels.append(y.to(home).long())
            if exact is not None:
                assert grown is not None
                slack.append(_slack(exact, grown, x, computed).to(home))
    if lipschitz is None or not logits:
        raise ValueError("certify needs at least one batch, got none")
    scores, classes, slacks = torch.cat(logits), torch.cat(labels), torch.cat(slack) if rounding else None
    values, error = (scores, scores.new_zeros(())) if slacks is None else (scores.double(), slacks)
    radius = certified_radius(values, classes, lipschitz, error)
    if rates is not None:
        radius = radius.maximum(pairwise_radius(values, classes, rates.to(values.device), slack=error))
    if slacks is not None:
        radius = rounded_down(radius, scores.dtype)
    rests_on: Literal["pairwise", "lipschitz"] = "lipschitz" if rates is None else "pairwise"
    return Certificates(scores, classes, radius, lipschitz, eps, slacks, rests_on)


def _bound(walk: Walk, shape: Sequence[int], part: nn.Module) -> float:
    return max(walk.growth(part, shape).lipschitz, _TINY)


def _slack(exact: nn.Module, grown: Growth, x: Tensor, computed: Tensor) -> Tensor:
    """Bound of the rounding error of each example: measured against `exact`, whose own error `grown` bounds."""
    x, computed = in_double_near(x), in_double_near(computed)
    error = row_norms(computed - exact(x.clone()))
    slack: Tensor = error + grown.error(row_norms(x))
    return slack.nan_to_num(nan=math.inf, posinf=math.inf)  # of logits that overflow nothing is known
