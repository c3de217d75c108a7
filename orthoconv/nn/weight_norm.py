"""The scale g and the optional signs around a transform (Section 4.1)."""

__all__ = ["Signs", "WeightNormed"]

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from orthoconv.linalg import weight_norm
from orthoconv.nn.identity import identity_
from orthoconv.nn.reparametrized import Reparametrized

Signs = Literal["random"] | Sequence[int] | Tensor | None

_LEAST_NORM = 1e-3  # of a kernel, for each channel


class WeightNormed(Reparametrized):
    """Layer whose operator comes from g V / |V|, where V is its `weight`, and perhaps from fixed `signs`; abstract."""

    weight: nn.Parameter
    g: nn.Parameter
    signs: Tensor | None

    def add_scale(self, signs: Signs, n: int) -> None:
        """Add g, and signs for n inputs, to a layer that has its weight."""
        self.g = nn.Parameter(torch.empty((), dtype=self.weight.dtype, device=self.weight.device))
        self.register_buffer("signs", _check_signs(signs, n, self.weight))

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does, or as the identity; g = |V|, so that g V / |V| starts as V."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.identity:
            identity_(self.weight, getattr(self, "groups", 1), turns=False)
        nn.init.constant_(self.g, torch.linalg.vector_norm(self.weight.detach()))
        self.reset_bias()

    @torch.no_grad()
    def set_kernel(self, kernel: Tensor, signs: Tensor) -> None:
        """Let g V / |V| be `kernel`, and give the layer these signs."""
        self.weight.copy_(kernel)
        norm = torch.linalg.vector_norm(kernel)
        if norm < _LEAST_NORM * math.sqrt(min(kernel.shape[:2])):  # a symmetric kernel has the same transform
            identity_(self.weight, getattr(self, "groups", 1), turns=False)
            norm = torch.linalg.vector_norm(self.weight.add_(kernel))
        self.g.copy_(norm)
        self.signs = signs.to(self.weight)

    @property
    def kernel(self) -> Tensor:
        """What is transformed, g V / |V|."""
        return weight_norm(self.weight, self.g)

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight, self.g) if self.signs is None else (self.weight, self.g, self.signs)


def _check_signs(signs: Signs, n: int, like: Tensor) -> Tensor | None:
    """Return `signs` as a tensor of n entries that are 1 or -1; draw them for "random"; None for None."""
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
