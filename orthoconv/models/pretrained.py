"""Networks that come with the package, trained."""

__all__ = ["PRETRAINED", "card", "pretrained"]

from importlib.resources import as_file, files
from typing import Any

from torch import nn

from orthoconv.files import sha256
from orthoconv.models.build import build
from orthoconv.weights import CheckpointError, load_into, read

PRETRAINED = {
    "kwlarge_cayley_cifar10": "7a06d241b336aa98586e2e9ae9c9ff0950fec4844f45a59af76b4cf9a530ff1f"
}  # and the digest of the weights of each


def pretrained(name: str) -> nn.Sequential:
    """A trained network, in eval mode. What it was trained on, how, and what it reaches is in its `card`.

    Raises:
        CheckpointError: If the file is damaged, or not the one that this version of the package came with.
    """
    tensors, about = _open(name)
    model = build(**about["model"])
    load_into(_path(name), model, tensors)
    return model.eval()


def card(name: str) -> dict[str, Any]:
    """What a trained network was trained on, how, and what it reaches: clean, certified and under attack."""
    return _open(name)[1]


def _open(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if name not in PRETRAINED:
        raise ValueError(f"name must be one of {', '.join(map(repr, PRETRAINED))}, got {name!r}")
    with as_file(_path(name)) as path:
        tensors, header = read(path)
    if (digest := sha256(tensors)) != PRETRAINED[name]:
        raise CheckpointError(f"{path} has weights with the SHA-256 {digest}, not {PRETRAINED[name]}; install again")
    found: dict[str, Any] = header["state"]
    return tensors, found


def _path(name: str) -> Any:
    return files("orthoconv.models").joinpath(f"{name}.safetensors")
