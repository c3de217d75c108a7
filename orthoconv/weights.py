"""Weights: one safetensors file with a JSON header, written whole or not at all, and checked when it is read."""

__all__ = ["CheckpointError", "compact", "load_into", "load_weights", "read", "save_weights", "write"]

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.files import sha256, write_atomically


class CheckpointError(Exception):
    """A checkpoint cannot be used; the message has its path and the reason.

    >>> load_weights(Path("missing.safetensors"), None)
    Traceback (most recent call last):
    ...
    orthoconv.weights.CheckpointError: missing.safetensors does not exist
    """


def save_weights(path: Path, model: nn.Module, card: dict[str, Any]) -> None:
    """Write the weights of a model.

    Arguments:
        path: File to write.
        model: Model to save.
        card: What goes with the weights; it must be JSON. With "network", the arguments of `orthoconv.models.build`,
            `orthoconv.models.load` can open the file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     save_weights(path, nn.Linear(2, 3), {"note": "mine"})
    ...     load_weights(path, nn.Linear(2, 3))
    {'note': 'mine'}
    """
    write(path, {f"model.{k}": v for k, v in model.state_dict().items()}, {"state": card})


def load_weights(path: Path, model: nn.Module | None) -> dict[str, Any]:
    """Read a file by `save_weights` or `save_checkpoint` into `model`, if it is given, and return its card or state.

    Arguments:
        path: File to read.
        model: Module that takes the weights, or None to read the card alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     save_weights(path, nn.Linear(2, 3), {"note": "mine"})
    ...     load_weights(path, nn.Linear(2, 3))
    {'note': 'mine'}
    """
    tensors, header = read(path)
    if model is not None:
        load_into(path, model, tensors)
    state: dict[str, Any] = header["state"]
    return state


def write(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors by name, and a header that must be JSON."""
    from safetensors.torch import save  # here, because `import orthoconv` costs torch and nothing else

    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}  # a layer may stand in two places
    text = json.dumps({**header, "sha256": sha256(tensors)})
    data = save(tensors, {"orthoconv": text, "sha256": _seal(text, tensors)})
    try:
        write_atomically(path, data)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error.strerror or error}; what was there before is unchanged"
        ) from error


def compact(tensor: Tensor) -> Tensor:
    """Return a float32 tensor in float16, if that changes none of its numbers; otherwise as it is.

    >>> compact(torch.tensor([0.5])).dtype, compact(torch.tensor([1 / 3])).dtype
    (torch.float16, torch.float32)
    """
    half = tensor.half()
    return half if tensor.dtype == torch.float32 and torch.equal(half.float(), tensor) else tensor


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the header of a file by `write`."""
    from safetensors.torch import load

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        data = path.read_bytes()  # once: `safe_open` opens a path twice, and it may be replaced in between
        tensors = dict(sorted(load(data).items()))
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
        header = json.loads(about.get("orthoconv", "null"))
        digest = sha256(tensors)
    except Exception as error:  # whatever a file of any bytes makes the parsers raise
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get("state"), dict):
        raise CheckpointError(f"{path} is not a checkpoint of orthoconv: it has no header 'orthoconv' with a state")
    if header.get("sha256") != digest:
        raise CheckpointError(f"{path} is damaged: its tensors do not have the digest that it was written with")
    if len(about) > 1 and about != {"orthoconv": about["orthoconv"], "sha256": _seal(about["orthoconv"], tensors)}:
        raise CheckpointError(f"{path} is damaged: its header does not have the digest that it was written with")
    return tensors, header


def _seal(text: str, tensors: dict[str, Tensor]) -> str:
    """Return a digest of the header and of the names, types and shapes; files of version 0.1.0 may lack it."""
    layout = [(name, str(tensors[name].dtype), list(tensors[name].shape)) for name in sorted(tensors)]
    return hashlib.sha256(json.dumps([text, layout]).encode()).hexdigest()


def load_into(path: Path, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint that are weights into `model`; `path` is the checkpoint's, for errors."""
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    own = model.state_dict()
    differences = [
        f"{k}: {_kind(weights.get(k))} in the file, {_kind(own.get(k))} in the model"
        for k in [*own, *(k for k in weights if k not in own)]
        if _kind(weights.get(k)) != _kind(own.get(k))
    ]
    if differences:
        raise CheckpointError(
            f"{path} is of another architecture; {len(differences)} tensors differ, the first is {differences[0]}"
        )
    model.load_state_dict(weights)


def _kind(tensor: Tensor | None) -> str:
    """Describe a tensor: two of the same description can be copied; real numbers of any precision are alike."""
    if tensor is None:
        return "missing"
    return f"{tuple(tensor.shape)} of {'real numbers' if tensor.is_floating_point() else tensor.dtype}"
