"""Figures of a run that stay on the device, and are read at intervals: a step waits for nothing."""

__all__ = ["Meter", "TrainingError"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.devices import device_of


class TrainingError(Exception):
    """A run cannot continue; the message says at which step, and which checkpoint there is.

    >>> issubclass(TrainingError, Exception)
    True
    """


class Meter:
    """Sums over the steps of an epoch, and the first step at which the loss or a gradient was not finite.

    On a CPU that step is an error at once. On an accelerator the host would wait for it, so it is an error when the
    figures are read: every `budget.READ_EVERY` steps, and before a checkpoint is written.

    Arguments:
        model: What is trained, on its device.
        sums: Sums to begin with.
        name: What errors call the loss.
    """

    def __init__(self, model: nn.Module, sums: Sequence[float], name: str = "loss") -> None:
        self._model, self._name, self._device = model, name, device_of(model)
        self._dtype = torch.float64 if budget.has_double(self._device) else torch.float32
        self._facts: Tensor | None = None  # of the first bad step, or of the last one: bad, step, loss, gradient norms
        self.reset(sums)

    def reset(self, sums: Sequence[float]) -> None:
        """Begin with these sums."""
        self._sums = torch.tensor(sums, dtype=self._dtype).to(self._device)

    def add(self, figures: Tensor) -> None:
        """Add the figures of a step."""
        self._sums += figures.to(self._dtype)

    def is_due(self, step: int) -> bool:
        """Whether the figures are to be read after that step."""
        return budget.has_cache(self._device) or step % budget.READ_EVERY == 0

    def read(self, note: str = "") -> list[float]:
        """Return the sums; raise a TrainingError that ends with `note` if a step was bad."""
        if self._facts is not None:
            bad, step, *rest = self._facts.cpu().tolist()
            if bad:
                raise self._error(int(step), rest, note)
        sums: list[float] = self._sums.cpu().tolist()
        return sums

    def check(self, step: int, loss: Tensor, note: str = "") -> None:
        """Look at the loss and the gradients of a step before the weights change."""
        values = torch.stack([loss.detach(), *(gradient.norm() for _, gradient in self._gradients())])
        bad = ~torch.isfinite(values.sum())
        if budget.has_cache(self._device):
            if bool(bad):
                raise self._error(step, values.tolist(), note)
            return
        facts = torch.cat((bad.to(values.dtype)[None], values.new_full((1,), step), values))
        self._facts = facts if self._facts is None else torch.where(self._facts[0] > 0, self._facts, facts)

    def _gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None]

    def _error(self, step: int, values: Sequence[float], note: str) -> TrainingError:
        loss, *slopes = values
        norms = dict(zip((name for name, _ in self._gradients()), slopes, strict=True))
        worst = max(norms, key=lambda name: norms[name] if math.isfinite(norms[name]) else math.inf)
        return TrainingError(
            f"step {step}: the {self._name} is {loss}; the largest gradient is that of {worst} ({norms[worst]:.3g})"
            f"{note}. A lower learning rate may help."
        )
