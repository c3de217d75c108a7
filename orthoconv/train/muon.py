"""Muon: matrices move along the polar factor of their momentum, and all else as in Adam."""

__all__ = ["Muon", "polar_direction"]

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# a, b and c of X -> a X + b (X X*) X + c (X X*)^2 X, step by step. Together they bring each singular value between
# 0.008 and 1 to one between 0.8 and 1.2.
_STEPS = (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)
_SIZE = 0.2  # root mean square of the entries of a direction, about that of a step of Adam


class Muon(torch.optim.Adam):
    """Adam, but weights of two and more axes move along the polar factor of their momentum (Jordan et al., 2024).

    Every direction of a weight then moves equally far, also those whose gradients are small. The entries of a step
    have a root mean square of 0.2 lr, about that of Adam, so that one learning rate suits both. Biases, factors and the
    last weight of the model, its head, are left to Adam.

    Arguments:
        model: Model whose parameters are trained.
        lr: Learning rate.
        momentum: Share of the old momentum in the new one.

    >>> model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    >>> optimizer = Muon(model, lr=0.01)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.95) -> None:
        weights = [p for name, p in model.named_parameters() if p.ndim > 1 and "bias" not in name]
        matrices = {id(p): p for p in weights[:-1]}
        others = [p for p in model.parameters() if id(p) not in matrices]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": list(matrices.values()), "momentum": momentum}]
        super().__init__([group for group in groups if group["params"]], lr=lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; `closure` is that of torch.optim.Adam."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        loss = super().step(closure)
        self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._move(group["params"], group["lr"], group["momentum"])
        return loss

    def _move(self, weights: Iterable[Tensor], lr: float, momentum: float) -> None:
        for w in weights:
            if w.grad is None:
                continue
            state = self.state[w]
            if not state:  # named as in Adam, which looks for the number of steps when a checkpoint is read
                state["step"], state["exp_avg"] = torch.tensor(0.0), torch.zeros_like(w)
            state["step"] += 1
            mean = state["exp_avg"].lerp_(w.grad, 1 - momentum)
            ahead = torch.lerp(w.grad, mean, momentum).flatten(1)
            w.sub_(polar_direction(ahead).view_as(w), alpha=lr * _SIZE * max(ahead.shape) ** 0.5)


def polar_direction(M: Tensor) -> Tensor:
    """A matrix with the singular vectors of M (m, n), whose singular values are about 1.

    Arguments:
        M: Real matrix, of any scale.

    >>> x = polar_direction(torch.diag(torch.tensor([1.0, 10.0])))
    >>> bool(((x.diag() > 0.8) & (x.diag() < 1.2)).all())
    True
    """
    if M.shape[0] > M.shape[1]:
        return polar_direction(M.T).T
    X = M / M.abs().max().clamp_min(torch.finfo(M.dtype).tiny)  # whose squares neither vanish nor overflow
    G = X @ X.T  # the steps are taken on G and on the polynomial P of it, which are smaller than X
    H = G @ G
    largest = H.norm().clamp_min(torch.finfo(M.dtype).tiny).sqrt()  # of the eigenvalues of G, or above
    G, H, one = G / largest, H / largest**2, torch.eye(len(M), dtype=M.dtype, device=M.device)
    P = one
    for k, (a, b, c) in enumerate(_STEPS):
        Q = a * one + b * G + c * H
        P = Q @ P if k else Q
        if k + 1 < len(_STEPS):
            G = Q @ G @ Q
            H = G @ G
    D: Tensor = P @ X / largest.sqrt()
    return D
