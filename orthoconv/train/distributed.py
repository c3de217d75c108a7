"""One process or many, as torchrun starts them."""

__all__ = ["World", "finish", "start", "total"]

import os
from typing import NamedTuple

import torch
from torch import Tensor, distributed


class World(NamedTuple):
    """The number of this process and of all of them."""

    rank: int
    size: int


def start() -> World:
    """Join the processes that torchrun started, if it did: gloo on a CPU, nccl on GPUs."""
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
    """Sum of `values` over all processes."""
    if world.size > 1:
        distributed.all_reduce(values)
    return values
