"""Attempts to break a bound or a certificate, written without the library's own attacks where that is short."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from orthoconv.attacks import L2Ball, pgd

_STEPS = 6


def pairs(model: nn.Module, x: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of batches, whose outputs are made ever farther apart by ascent; each example has a radius of its own."""
    source = torch.Generator().manual_seed(seed)
    radius = 10 ** torch.empty(len(x), dtype=torch.float64).uniform_(-2, 1, generator=source)
    column = radius.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
    d = torch.randn(x.shape, generator=source, dtype=torch.float64).to(x.dtype)
    for _ in range(_STEPS):
        d = column * _unit(d)
        yield x, (x + d)
        gradient = _slope(model, x, d)
        d = d / column + (torch.randn(x.shape, generator=source).to(x) if gradient is None else _unit(gradient))


def _unit(d: Tensor) -> Tensor:
    norms = d.flatten(1).norm(dim=1).clamp_min(1e-30)
    return d / norms.view(-1, *[1] * (d.ndim - 1))


def _slope(model: nn.Module, x: Tensor, d: Tensor) -> Tensor | None:
    """Gradient by d of |f(x + d) - f(x)|, or None where torch has none, as after some work in place."""
    d = d.detach().requires_grad_()
    try:
        y = model(x.clone()).detach()
        moved = (model((x + d).clone()) - y).flatten(1).norm(dim=1).sum()
        (gradient,) = torch.autograd.grad(moved, d, allow_unused=True)
    except RuntimeError:
        return None
    return None if gradient is None or not bool(gradient.isfinite().all()) else gradient


def attack(model: nn.Module, x: Tensor, labels: Tensor, radius: Tensor, seed: int) -> Tensor:
    """Inputs within so far of each example: what PGD finds, or where torch has no gradient, a random one."""
    ball, source = L2Ball(radius.to(x.dtype), -math.inf, math.inf), torch.Generator().manual_seed(seed)
    try:
        return pgd(model, x, labels, ball, iterations=8, generator=source)
    except (RuntimeError, TypeError):
        return x + ball.start(x, source)
