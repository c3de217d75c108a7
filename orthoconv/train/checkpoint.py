"""Checkpoints: everything that a run goes on from, in one file."""

__all__ = ["load_checkpoint", "save_checkpoint"]

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.weights import load_into, read, write


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write the model, the optimizer, the random state and `state`, which must be JSON."""
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    saved = optimizer.state_dict()
    tensors |= {f"optimizer.{i}.{k}": v for i, s in saved["state"].items() for k, v in s.items()}
    tensors["rng"] = torch.get_rng_state()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    write(path, tensors, {"state": state, "groups": groups})


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the model, the optimizer and the random state back, and return `state`."""
    tensors, header = read(path)
    load_into(path, model, tensors)
    saved = optimizer.state_dict()
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            states.setdefault(int(index), {})[key] = value
    groups = [
        {**new, "params": old["params"]} for new, old in zip(header["groups"], saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    torch.set_rng_state(tensors["rng"])
    state: dict[str, Any] = header["state"]
    return state
