"""Muon: matrices move along the polar factor of their momentum, and all else as in Adam."""

__all__ = ["Muon", "polar_direction"]

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.products import product

# a, b and c of X -> a X + b (X X*) X + c (X X*)^2 X, step by step. Together they bring each singular value between
# 0.008 and 1 to one between 0.8 and 1.2.
_STEPS = (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)
_SIZE = 0.2  # root mean square of the entries of a direction, about that of a step of Adam
_BETAS, _EPS = (0.9, 0.999), 1e-8  # of Adam


class Muon(torch.optim.Optimizer):
    """Adam, but weights of linear layers and convolutions move along the polar factor of their momentum.

    All directions of such a weight then move about equally far, also those whose gradients are small (Jordan et al.,
    2024). The entries of a step have a root mean square of about 0.2 lr, as in Adam, so that one learning rate suits
    both. Adam moves everything else: biases, factors, weights of other layouts such as those of BCOP, and the last of
    the weights, the head.

    Arguments:
        model: Model whose parameters are trained. Train the members of an `Ensemble` by themselves.
        lr: Learning rate.
        momentum: Share of the old momentum in the new one.

    >>> model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    >>> optimizer = Muon(model, lr=0.01)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.95) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {momentum!r}")
        weights = [m.weight for m in model.modules() if _has_matrix(m)]
        matrices = {id(w): w for w in weights if w is not weights[-1]}
        others = [p for p in model.parameters() if id(p) not in matrices]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": list(matrices.values()), "momentum": momentum}]
        super().__init__([group for group in groups if group["params"]], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Arguments:
            closure: Function that computes the loss and its gradients again, if any; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for w in (p for p in group["params"] if p.grad is not None):
                if "momentum" in group:
                    _muon_step(w, self.state[w], group["lr"], group["momentum"])
                else:
                    _adam_step(w, self.state[w], group["lr"])
        return loss


def _has_matrix(module: nn.Module) -> bool:
    """Whether a layer has a weight (o, i), or a kernel (o, i, ...) with an axis for each of its `kernel_size`."""
    if not (hasattr(module, "out_features") or hasattr(module, "out_channels")):  # a norm, or an embedding
        return False
    weight, size = module._parameters.get("weight"), getattr(module, "kernel_size", ())
    return weight is not None and weight.ndim == 2 + (len(size) if isinstance(size, tuple) else 0) and weight.ndim > 1


def _muon_step(w: Tensor, state: dict[str, Tensor], lr: float, momentum: float) -> None:
    if not state:
        state["exp_avg"] = torch.zeros_like(w)
    mean = state["exp_avg"].lerp_(w.grad, 1 - momentum)  # type: ignore[arg-type]
    ahead = torch.lerp(w.grad, mean, momentum).flatten(1)  # type: ignore[arg-type]
    w.sub_(polar_direction(ahead).view_as(w), alpha=lr * _SIZE * max(ahead.shape) ** 0.5)


def _adam_step(w: Tensor, state: dict[str, Tensor], lr: float) -> None:
    if not state:
        state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w)}
    state["step"] += 1
    mean = state["exp_avg"].lerp_(w.grad, 1 - _BETAS[0])  # type: ignore[arg-type]
    square = state["exp_avg_sq"].lerp_(w.grad.square(), 1 - _BETAS[1])  # type: ignore[union-attr]
    first, second = (1 - beta ** state["step"].item() for beta in _BETAS)
    w.addcdiv_(mean, (square / second).sqrt_().add_(_EPS), value=-lr / first)


def polar_direction(M: Tensor) -> Tensor:
    """A matrix with the singular vectors of M (m, n), whose singular values are about 1.

    Those of M below about 1/125 of the largest become less than 1: they grow 120 times.

    Arguments:
        M: Real matrix, of any scale.

    >>> x = polar_direction(torch.diag(torch.tensor([1.0, 10.0])))
    >>> bool(((x.diag() > 0.8) & (x.diag() < 1.2)).all())
    True
    """
    if M.shape[0] > M.shape[1]:
        return polar_direction(M.T).T
    X = M / M.abs().max().clamp_min(torch.finfo(M.dtype).tiny)  # whose squares neither vanish nor overflow
    G = product(X, X.T)  # the steps are taken on G and on the polynomial P of it, which are smaller than X
    H = product(G, G)
    largest = H.norm().clamp_min(torch.finfo(M.dtype).tiny).sqrt()  # of the eigenvalues of G, or above
    G, H, one = G / largest, H / largest**2, torch.eye(len(M), dtype=M.dtype, device=M.device)
    P = one
    for k, (a, b, c) in enumerate(_STEPS):
        Q = a * one + b * G + c * H
        P = product(Q, P) if k else Q
        if k + 1 < len(_STEPS):
            G = product(product(Q, G), Q)
            H = product(G, G)
    D: Tensor = product(P, X) / largest.sqrt()
    return D
