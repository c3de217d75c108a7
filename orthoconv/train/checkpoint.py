"""Checkpoints: everything that a run needs to continue, in one file."""

__all__ = ["load_checkpoint", "save_checkpoint"]

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.weights import CheckpointError, load_into, read, write


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write the model, the optimizer, the random state and `state`, which must be JSON.

    Arguments:
        path: File of the checkpoint.
        model: Model in training.
        optimizer: Its optimizer.
        state: What else a run needs to continue; it must be JSON.

    >>> import tempfile
    >>> model = nn.Linear(2, 3)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "checkpoint.safetensors"
    ...     save_checkpoint(path, model, optimizer, {"done": 7})
    ...     load_checkpoint(path, model, optimizer)
    {'done': 7}
    """
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    saved = optimizer.state_dict()
    tensors |= {f"optimizer.{i}.{k}": v for i, s in saved["state"].items() for k, v in s.items()}
    tensors["rng"] = torch.get_rng_state()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    write(path, tensors, {"state": state, "groups": groups})


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    check: Callable[[dict[str, Any]], object] | None = None,
) -> dict[str, Any]:
    """Restore the model, the optimizer and the random state, and return `state`.

    Arguments:
        path: File of the checkpoint.
        model: Model in training.
        optimizer: Its optimizer.
        check: Called with `state` before anything is changed; it may raise an error.

    >>> import tempfile
    >>> model = nn.Linear(2, 3)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "checkpoint.safetensors"
    ...     save_checkpoint(path, model, optimizer, {"done": 7})
    ...     load_checkpoint(path, model, optimizer)
    {'done': 7}
    """
    tensors, header = read(path)
    if check is not None:
        check(header["state"])
    load_into(path, model, tensors)
    try:
        _restore(optimizer, tensors, header)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} has weights, but not all that a run needs to continue: {error}") from error
    state: dict[str, Any] = header["state"]
    return state


def _restore(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Restore the optimizer and the random state."""
    saved = optimizer.state_dict()
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            shape = torch.Size() if key == "step" else shapes[int(index)]
            if value.shape != shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(shape)}")
            states.setdefault(int(index), {})[key] = value
    for group in saved["param_groups"]:
        if len({frozenset(states[i]) for i in group["params"] if i in states}) > 1:
            raise ValueError("the optimizer knows more of some parameters than of others")
    groups = []
    for new, old in zip(header["groups"], saved["param_groups"], strict=True):
        if odd := [k for k in new if k in old and not _alike(new[k], old[k])]:
            raise ValueError(f"{odd[0]} of the optimizer is {new[odd[0]]!r}")
        groups.append({**old, **new, "params": old["params"]})
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    torch.set_rng_state(tensors["rng"])


def _alike(a: Any, b: Any) -> bool:
    """Return whether both are numbers, or truth values, or None, or lists whose entries are alike."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    types = [float if isinstance(v, int) and not isinstance(v, bool) else type(v) for v in (a, b)]
    return types[0] is types[1]
