"""One process, or several that torchrun started."""

__all__ = ["World", "finish", "start", "total"]

import os
from typing import NamedTuple

import torch
from torch import Tensor, distributed


class World(NamedTuple):
    """The number of this process, and how many there are."""

    rank: int
    size: int


def start() -> World:
    """Join the other processes if torchrun started several: by gloo on a CPU, by nccl on GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(0, 1)
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return World(distributed.get_rank(), distributed.get_world_size())


def finish(world: World) -> None:
    """Leave the other processes."""
    if world.size > 1:
        distributed.destroy_process_group()


def total(values: Tensor, world: World) -> Tensor:
    """Return the sum of `values` over all processes."""
    if world.size > 1:
        distributed.all_reduce(values)
    return values
