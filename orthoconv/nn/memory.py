"""Operators computed from parameters, and remembered only as long as the parameters stay the same."""

__all__ = ["Pair", "Reparametrized", "frozen"]

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from orthoconv.tracing import full_precision, in_full_precision, is_concrete, pull_back

Pair = tuple[int, int]

_SIZES_KEPT = 4  # image sizes whose operators a layer remembers; bounds its memory


class Reparametrized(nn.Module, ABC):
    """Layer whose operator is a function of its parameters, computed once where they do not change.

    In training mode the operator is computed at each forward pass. In eval mode, or inside `frozen`, it is
    remembered for each image size together with the settings and a copy of the tensors it came from, and used again
    only while those are equal, entry by entry: no edit, however made, leaves it stale. Gradients are those of the
    parameters in every mode; where only the input's are asked for, the operator is not computed again.
    """

    depends_on_size: ClassVar[bool] = True
    _snapshot: tuple[Tensor, ...]
    _memory: dict[Pair, Tensor]
    _remembered: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._frozen = 0
        self._forget()

    @abstractmethod
    def sources(self) -> tuple[Tensor, ...]:
        """Tensors that determine the operator."""

    @abstractmethod
    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        """Operator on images of that size, a differentiable function of `sources` and of nothing else."""

    def recall(self, size: Pair = (1, 1)) -> Tensor:
        """Operator for images of that size, from memory where that is allowed."""
        sources = self.sources()
        size = size if self.depends_on_size else (1, 1)
        compute = partial(self._compute, size)
        if not self.remembers or not is_concrete(*sources):
            self.check()
            return compute(*sources)
        check_precision(type(self).__name__, sources[0].dtype)
        value = self._lookup(size, sources, compute)
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            value = _Recall.apply(compute, value, *sources)
        return value

    @property
    def remembers(self) -> bool:
        """Whether the operator is remembered, here and now."""
        return self._frozen > 0 or not self.training

    def check(self) -> None:
        """Raise an error if the parameters have the wrong precision, or entries that are not finite."""
        check_precision(type(self).__name__, self.sources()[0].dtype)
        self.check_finite()

    def _compute(self, size: Pair, *sources: Tensor) -> Tensor:
        with full_precision(sources[0]):
            return self.operator(size, *sources)

    def _lookup(self, size: Pair, sources: tuple[Tensor, ...], compute: Callable[..., Tensor]) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            settings = self._settings()
            if settings != self._remembered or not _equal(self._snapshot, sources):
                self.check_finite()
                self._forget()
                self._remembered = settings
                self._snapshot = tuple(source.detach().clone() for source in sources)
            if size not in self._memory:
                self._memory[size] = compute(*self._snapshot)
            while len(self._memory) > _SIZES_KEPT:
                del self._memory[next(iter(self._memory))]
            return self._memory[size]

    def _settings(self) -> dict[str, Any]:
        """Plain attributes, of which some enter the operator."""
        plain = {k: v for k, v in vars(self).items() if k[0] != "_" and isinstance(v, int | float | str | tuple)}
        del plain["training"]
        return plain

    def _forget(self) -> None:
        self._snapshot, self._memory, self._remembered = (), {}, {}

    def check_finite(self) -> None:
        """Raise a ValueError if a source has entries that are not finite, where looking at them is cheap."""
        sources = self.sources()
        if not is_concrete(*sources) or not (self.remembers or sources[0].device.type == "cpu"):
            return
        for source in sources:
            if not math.isfinite(norm := torch.linalg.vector_norm(source.detach()).item()):
                names = [k for k, v in (*self.named_parameters(), *self.named_buffers()) if v is source]
                bad = int((~torch.isfinite(source)).sum())
                raise ValueError(
                    f"{type(self).__name__} needs finite weights: {' '.join(names) or 'a weight'} has norm "
                    f"{norm}, with {bad} non-finite of {source.numel()} entries"
                )

    def train(self, mode: bool = True) -> "Reparametrized":
        if mode:
            self._forget()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_snapshot": (), "_memory": {}, "_remembered": {}, "_frozen": 0}


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which each layer of `model` computes its operator once per image size, in any mode.

    >>> layer = nn.Identity()
    >>> with frozen(layer):
    ...     y = layer(torch.ones(2))
    """
    layers = [m for m in model.modules() if isinstance(m, Reparametrized)]
    for layer in layers:
        layer._frozen += 1
    try:
        yield model
    finally:
        for layer in layers:
            layer._frozen -= 1
            if layer.training and not layer._frozen:
                layer._forget()


class _Recall(torch.autograd.Function):
    """A remembered value, with the gradient that computing it would have had."""

    generate_vmap_rule = True

    @staticmethod
    def forward(compute: Callable[..., Tensor], value: Tensor, *sources: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.compute, _, *sources = inputs
        ctx.save_for_backward(*sources)

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sources = ctx.saved_tensors
        wanted = [source.requires_grad for source in sources]
        with torch.enable_grad():
            value = ctx.compute(*sources)
        return None, None, *pull_back(value, sources, wanted, grad, create_graph=torch.is_grad_enabled())


def check_precision(name: str, dtype: torch.dtype) -> None:
    """Raise a TypeError if parameters have a precision in which no transform can be computed."""
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} computes in torch.float32 or torch.float64, its parameters are {dtype}")


def _equal(snapshot: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> bool:
    return len(snapshot) == len(sources) and all(
        a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(snapshot, sources, strict=True)
    )
