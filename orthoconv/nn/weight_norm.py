"""The scale g and the optional signs around the Cayley transform (Section 4.1)."""

__all__ = ["Signs", "WeightNormed", "weight_norm"]

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orthoconv.linalg import weight_norm_gradients, weight_scale
from orthoconv.nn.memory import Reparametrized
from orthoconv.tracing import in_full_precision, is_eager, pull_back

Signs = Literal["random"] | Sequence[int] | Tensor | None


class WeightNormed(Reparametrized):
    """Layer whose operator comes from g V / |V|, V its `weight`, and perhaps from fixed `signs`; abstract."""

    weight: nn.Parameter
    g: nn.Parameter
    signs: Tensor | None

    def add_scale(self, signs: Signs, n: int) -> None:
        """Add g, and signs for n inputs, to a layer that has its weight; and set the parameters."""
        self.g = nn.Parameter(torch.empty((), dtype=self.weight.dtype, device=self.weight.device))
        self.register_buffer("signs", _check_signs(signs, n, self.weight))
        self.reset_parameters()

    @abstractmethod
    def reset_bias(self) -> None:
        """Set the bias."""

    def reset_parameters(self) -> None:
        """PyTorch's initialisation of such a layer; g = |V|, so that g V / |V| starts as V."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.constant_(self.g, torch.linalg.vector_norm(self.weight.detach()))
        self.reset_bias()

    @property
    def kernel(self) -> Tensor:
        """What is transformed, g V / |V|."""
        return weight_norm(self.weight, self.g)

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight, self.g) if self.signs is None else (self.weight, self.g, self.signs)


def weight_norm(V: Tensor, g: Tensor) -> Tensor:
    """g V / |V| (Section 4.1), zero where V is."""
    if not is_eager(V, g):
        return torch.mul(V, weight_scale(V, g))
    kernel: Tensor = _WeightNorm.apply(V, g)
    return kernel


class _WeightNorm(torch.autograd.Function):
    """g V / |V|, whose gradient takes as few passes over V as it can."""

    @staticmethod
    def forward(ctx: Any, V: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(V, g)
        return torch.mul(V, weight_scale(V, g))

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        V, g = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: differentiate the ordinary way
            return pull_back(V * weight_scale(V, g), (V, g), ctx.needs_input_grad, grad)
        return weight_norm_gradients(grad.clone(), V, g)


def _check_signs(signs: Signs, n: int, like: Tensor) -> Tensor | None:
    """`signs` as a tensor of n entries that are 1 or -1, drawn at random if so asked; or None."""
    if signs is None:
        return None
    if isinstance(signs, str):
        if signs != "random":
            raise ValueError(f'signs must be None, "random" or {n} numbers that are 1 or -1, got {signs!r}')
        return (torch.randint(2, (n,), device=like.device) * 2 - 1).to(like)
    try:
        values = torch.as_tensor(signs)
    except (TypeError, ValueError, RuntimeError):
        values = torch.zeros(0)
    if values.shape != (n,) or not bool((values.abs() == 1).all()):
        raise ValueError(f'signs must be None, "random" or {n} numbers that are 1 or -1, got {signs!r}')
    return values.clone().to(like)
