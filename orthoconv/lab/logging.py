"""What follows a run while it trains: TensorBoard, or anything with the same two methods."""

__all__ = ["Logger", "TensorBoard"]

from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Receives the figures of a run."""

    def step(self, figures: dict[str, Any]) -> None:
        """Take the figures of the epoch so far, after a step."""

    def epoch(self, figures: dict[str, Any]) -> None:
        """Take the figures of an epoch: a line of metrics.jsonl."""


class TensorBoard:
    """Write the figures of a run for TensorBoard.

    Arguments:
        folder: Folder of the run; `tensorboard --logdir` takes it, or the one above it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ImportError('TensorBoard needs tensorboard: pip install "orthoconv[tensorboard]"') from error
        self._writer: Any = SummaryWriter(str(folder))

    def step(self, figures: dict[str, Any]) -> None:
        """Write the loss so far."""
        self._writer.add_scalar("step/loss", figures["loss"], figures["step"])

    def epoch(self, figures: dict[str, Any]) -> None:
        """Write every number of the epoch."""
        for name, value in figures.items():
            values = value if isinstance(value, dict) else {"": value}
            for part, number in values.items():
                at = f"epoch/{name} {part}".replace("/255", " of 255").strip()
                self._writer.add_scalar(at, number, figures["epoch"])
        self._writer.flush()
