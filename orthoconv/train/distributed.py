"""One process, or several that torchrun started."""

__all__ = ["World", "average_gradients", "finish", "share_buffers", "start", "together", "total"]

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from orthoconv.train.metering import TrainingError

_LOST = ("gloo", "nccl", "xccl", "connection", "socket", "timed out", "peer")  # in errors of a group that broke


class World(NamedTuple):
    """The number of this process, how many there are, and the device that this one computes on."""

    rank: int
    size: int
    device: torch.device = torch.device("cpu")


def start(device: torch.device = torch.device("cpu")) -> World:  # noqa: B008
    """Join the other processes if torchrun started several: by gloo on a CPU, else by torch's own for the device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(0, 1, device)
    if not distributed.is_initialized():
        distributed.init_process_group(distributed.get_default_backend_for_device(device))
    return World(distributed.get_rank(), distributed.get_world_size(), device)


def finish(world: World) -> None:
    """Leave the other processes."""
    if world.size > 1:
        distributed.destroy_process_group()


@contextmanager
def together(world: World, checkpoint: Path) -> Iterator[None]:
    """Turn the error that a process gets when another one has ended into a TrainingError that says so."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not any(word in str(error).lower() for word in _LOST):
            raise
        kept = f"continue from {checkpoint}" if checkpoint.exists() else "there is no checkpoint yet; begin again"
        first = str(error).strip().splitlines()[0]
        raise TrainingError(
            f"process {world.rank} of {world.size} lost another one, and ends: {first}. With --resume, {kept}"
        ) from error


def average_gradients(model: nn.Module, world: World) -> None:
    """Replace the gradients of this process by the mean over all processes.

    All are summed as one tensor, always in the same layout. The buckets of DistributedDataParallel change after its
    first step, and with three processes or more the order of their sums does, too: a run that is resumed would end with
    other weights.
    """
    if world.size == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = total(torch.cat([g.flatten() for g in gradients]), world) / world.size
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def share_buffers(model: nn.Module, world: World) -> None:
    """Give all processes the buffers of the first one, such as the statistics of a batch norm."""
    for buffer in model.buffers() if world.size > 1 else ():
        distributed.broadcast(buffer, 0)


def total(values: Tensor, world: World) -> Tensor:
    """Return the sum of `values` over all processes, on the device of this one."""
    if world.size == 1:
        return values
    values = values.to(world.device)
    distributed.all_reduce(values)
    return values
