"""Projected gradient descent (Madry et al., 2018)."""

__all__ = ["L2Ball", "column", "gradient_of", "pgd"]

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orthoconv.devices import move
from orthoconv.linalg import row_norms
from orthoconv.margins import margin

_TINY = 1e-12


@dataclass(frozen=True)
class L2Ball:
    """Perturbations of l2 norm at most `eps` that leave an input in [low, high]: what a step and a start are in it.

    Attributes:
        eps: Largest norm: a number, or a tensor (b,) with one for each example.
        low: Smallest value of an input.
        high: Largest value of an input.

    >>> L2Ball(0.5).project(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
    tensor([[0.3000, 0.4000]])
    """

    eps: float | Tensor
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not bool((torch.as_tensor(self.eps) >= 0).all()):
            raise ValueError(f"eps must be at least 0, got {self.eps!r}")

    def reach(self, x: Tensor) -> Tensor:
        """`eps` for each example of `x`, (b, 1, ...)."""
        return torch.as_tensor(self.eps, dtype=x.dtype, device=x.device).expand(len(x)).reshape(column(x))

    def start(self, x: Tensor, source: torch.Generator | None) -> Tensor:
        """A random point of the ball."""
        noise = torch.randn(x.shape, generator=source, dtype=x.dtype)
        share = torch.rand(len(x), generator=source, dtype=x.dtype) / row_norms(noise)
        return self.project(x, (noise * share.view(column(x))).to(x.device) * self.reach(x))

    def step(self, gradient: Tensor) -> Tensor:
        """The steepest direction, of norm 1."""
        return gradient / row_norms(gradient).clamp_min(_TINY).view(column(gradient))

    def project(self, x: Tensor, d: Tensor) -> Tensor:
        """Shorten `d` to the ball, then clip x + d to [low, high]; an entry outside of it may only move towards it."""
        reach = self.reach(x)
        d = d * (reach / torch.maximum(row_norms(d).view(column(x)), reach.clamp_min(_TINY)))
        return torch.minimum(torch.maximum(x + d, x.clamp_max(self.low)), x.clamp_min(self.high)) - x


def pgd(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    ball: L2Ball,
    *,
    iterations: int = 10,
    step: float | None = None,
    restarts: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Adversarial inputs: descent of the margin, projected to the ball, from random starts (Section 5.2).

    The margin of the true class, unlike the cross-entropy, keeps its gradient however large the logits are.

    Arguments:
        model: Function of a batch to logits.
        x: Inputs (b, ...), on any device, where the result will be.
        labels: True classes (b,).
        ball: Where perturbations may be.
        iterations: Steps of each ascent.
        step: Length of a step; eps / 4 by default.
        restarts: Number of random starts.
        generator: Source of the random starts.

    Returns:
        For each example the first input met with another class than its label, else the last one tried.

    >>> model, x = nn.Linear(2, 2, bias=False), torch.tensor([[0.5, 0.4]])
    >>> _ = nn.init.eye_(model.weight)  # the class is the larger entry
    >>> model(pgd(model, x, torch.tensor([0]), L2Ball(0.2))).argmax(1)
    tensor([1])
    """
    if not torch.is_grad_enabled():
        raise RuntimeError("PGD needs gradients; call it outside torch.no_grad")
    home, (x, labels) = x.device, move(model, x, labels)
    length = ball.reach(x) / 4 if step is None else step
    found, broken = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for _ in range(restarts):
        d = ball.start(x, generator)
        for k in range(iterations + 1):
            d = d.detach().requires_grad_()
            logits = model(x + d)
            found = torch.where(broken.view(column(x)), found, (x + d).detach())
            broken |= logits.detach().argmax(1) != labels
            if k == iterations or bool(broken.all()):
                break
            gradient = gradient_of(model, margin(logits, labels), d)
            d = ball.project(x, d.detach() - length * ball.step(gradient))
    return found.to(home)


def gradient_of(model: nn.Module, values: Tensor, x: Tensor) -> Tensor:
    """Return the gradient by `x` of the sum of values that a model has computed.

    Raises:
        TypeError: If there is none, because a layer that works in place has overwritten what it needs.
    """
    try:
        (gradient,) = torch.autograd.grad(values.sum(), x)
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        modules = model.modules() if isinstance(model, nn.Module) else ()  # or a function
        names = sorted({type(m).__name__ for m in modules if getattr(m, "inplace", False)})
        what = f"a layer ({', '.join(names)}) works in place on what another one needs for the gradient"
        raise TypeError(f"the model cannot be attacked, since {what}; build it with inplace=False") from error
    return gradient


def column(x: Tensor) -> list[int]:
    """Shape of one number for each example of `x`."""
    return [-1, *[1] * (x.ndim - 1)]
