"""Local Lipschitz constants, found by ascent."""

__all__ = ["empirical_lipschitz"]

import math

import torch
from torch import Tensor, nn

from orthoconv.attacks.descent import L2Ball, column, gradient_of
from orthoconv.devices import move
from orthoconv.linalg import row_norms

_ROUNDING = 4.0  # relative error of a computed value, in units of the precision; layers with a large bias have 1.3


def empirical_lipschitz(
    model: nn.Module,
    x: Tensor,
    eps: float,
    *,
    steps: int = 10,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Find local Lipschitz constants by ascent (Section 5.2; Yang et al., 2020): a lower bound for each example.

    Looks for the perturbation d, of norm at most `eps`, that makes |f(x + d) - f(x)| / |d| large: normalised gradient
    steps of eps / 4 from a random start. In training mode, put it inside `frozen(model)`, which is faster. The distance
    of two values counts less what rounding to their precision can make of it. A model whose values inside are much
    larger than its outputs rounds more: give `orthoconv.in_double(model)` and inputs in float64.

    Arguments:
        model: Function of a batch.
        x: Batch of inputs, on any device, where the result will be.
        eps: Radius of the ball; it must stand out from the rounding of the inputs.
        steps: Steps of ascent.
        bounds: Smallest and largest value of an input, or None.
        generator: Source of the random start.

    Returns:
        Shape (b,), the largest ratio met for each example.

    >>> empirical_lipschitz(nn.Softsign(), torch.zeros(2, 3), eps=0.1, bounds=None) <= 1
    tensor([True, True])
    """
    least = 1e4 * torch.finfo(x.dtype).eps * float(row_norms(x.detach()).max()) if len(x) else 0.0
    if not eps > least:
        raise ValueError(f"eps must be more than {least:.2g}, the rounding of these inputs in {x.dtype}, got {eps!r}")
    home, (x,) = x.device, move(model, x)
    ball = L2Ball(eps, *((-math.inf, math.inf) if bounds is None else bounds))
    tiny, best = torch.finfo(x.dtype).tiny, x.new_zeros(len(x))
    noise = torch.empty(x.shape, dtype=x.dtype).uniform_(-eps, eps, generator=generator).to(x.device)
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone()
        d, y = ball.project(x, noise.clone()), model(x.clone()).detach()  # a layer may work in place
        for step in range(steps + 1):
            z = (x + d).detach().requires_grad_()
            value, length = model(z.clone()), row_norms(z - x).clamp_min(tiny)
            distance = row_norms(value - y)
            best = torch.maximum(best, ((distance - _rounding(value, y)) / length).detach())
            if step < steps:
                grad = gradient_of(model, distance / length, z)
                step_size = eps / 4 / row_norms(grad).clamp_min(tiny)
                d = ball.project(x, (z - x).detach() + step_size.view(column(x)) * grad)
    return best.to(home)


def _rounding(y: Tensor, z: Tensor) -> Tensor:
    """Return what rounding can make of the distance of y (b, ...) and z, for each example."""
    return _ROUNDING * torch.finfo(y.dtype).eps * (row_norms(y.detach()) + row_norms(z))
