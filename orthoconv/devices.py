"""Which device computes: chosen by name for a command, and found from a model everywhere else."""

__all__ = ["choose_device", "device_of", "in_double_near", "in_reach_of_double", "move"]

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv import budget


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of that name, if this machine has it.

    Among processes that torchrun started, a name without a number is a device of its own for each process.

    Arguments:
        name: "auto" for the accelerator that torch finds, or else the CPU; "cpu"; or an accelerator such as "cuda",
            "cuda:1", "mps" or "xpu".

    >>> choose_device("cpu")
    device(type='cpu')
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        name = "cpu" if accelerator is None else accelerator.type
    known = {"cpu", "cuda", "mps", "xpu"} | ({accelerator.type} if accelerator is not None else set())
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in known:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1 and so on, mps or xpu, got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device)
    if not module.is_available():
        raise ValueError(f"device {name!r} is not available: torch {torch.__version__} finds none on this machine")
    return _numbered(device, name, module)


def _numbered(device: torch.device, name: str, module: Any) -> torch.device:
    """Return the device with its number, which must be one that the machine has; and make it the current one."""
    count, rank = module.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    index = rank if device.index is None else device.index
    if index >= count:
        cause = f"process {rank} of this machine needs one of its own" if device.index is None else f"got {name!r}"
        raise ValueError(f"this machine has {count} devices of type {device.type}, but {cause}")
    if device.type == "mps":
        return torch.device("mps")
    module.set_device(index)
    return torch.device(device.type, index)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors; the CPU for a model that has none.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def move(model: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors on the device of the model. A model without tensors, or a function, takes them as they are.

    >>> x, y = move(nn.Linear(2, 2), torch.zeros(1, 2), torch.zeros(1))
    """
    like = next(iter((*model.parameters(), *model.buffers())), None) if isinstance(model, nn.Module) else None
    return tensors if like is None else tuple(t.to(like.device) for t in tensors)


def in_reach_of_double(model: nn.Module) -> nn.Module:
    """Return the model; or a copy on the CPU, if the model is on a device that has no float64."""
    return model if budget.has_double(device_of(model)) else copy.deepcopy(model).cpu()


def in_double_near(x: Tensor) -> Tensor:
    """Return `x` in float64 where it is; or on the CPU, if it is on a device that has no float64.

    >>> in_double_near(torch.ones(1))
    tensor([1.], dtype=torch.float64)
    """
    return x.double() if budget.has_double(x.device) else x.cpu().double()
