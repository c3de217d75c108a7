"""Trained networks: from the folder of a run, from a file of weights, or from the package itself."""

__all__ = ["PRETRAINED", "build_arguments", "card", "load", "open_network", "pretrained", "run_arguments"]

import os
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from orthoconv import data
from orthoconv.data.names import class_names
from orthoconv.files import read_json, sha256
from orthoconv.models.describing import describe
from orthoconv.models.networks import build
from orthoconv.nn.arguments import pair
from orthoconv.weights import CheckpointError, load_into, read

PRETRAINED = {  # name, and SHA-256 of the weights
    "kwlarge_cayley_cifar10": "7a06d241b336aa98586e2e9ae9c9ff0950fec4844f45a59af76b4cf9a530ff1f",
    "cifar10_best": "3b8d9a908b0b5bf0468b89b10997b78718016f6d0526cdab63ddec932f5452e1",
    "cifar10_fast": "db481df330f2c374ca3af9966364a0b6524e2f122442ccd81f5c2858d4d5f74c",
}
"""Networks that come with the package: the name of each, and the SHA-256 of its weights.

>>> "kwlarge_cayley_cifar10" in PRETRAINED
True
"""


def load(path: str | os.PathLike[str]) -> nn.Sequential:
    """Open a trained network in eval mode. No data set is needed.

    The network knows the shape of its images and, if they were recorded, the names of its classes: its attributes
    `input_shape` and `class_names`; see `describe`.

    Arguments:
        path: Folder that `orthoconv train` wrote, or a .safetensors file whose header says how to build its network,
            such as `orthoconv publish` writes.

    Raises:
        FileNotFoundError: If the path does not exist, or is a folder without a run.
        CheckpointError: If the weights are damaged, or belong to another network.
        ValueError: If the description of the network is damaged or missing.

    >>> import tempfile
    >>> from orthoconv.weights import save_weights
    >>> network = {"name": ["conv 4 s2", "maxmin", "flatten", "head"], "image_size": 8}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     save_weights(path, build(**network), {"network": network})
    ...     len(load(path))
    4
    """
    path = Path(path)
    if path.is_dir():
        return open_network(run_arguments(path), path / "model.safetensors", path / "config.json")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    tensors, header = read(path)
    about = header["state"]
    return _assemble(about.get("network", about.get("model")), path, tensors, path, about)


def open_network(arguments: Any, weights: Path, source: Path) -> nn.Sequential:
    """Build a network and read its weights; `source` is the configuration that the arguments of `build` are from."""
    return _assemble(arguments, source, read(weights)[0], weights, read_json(source))


def run_arguments(folder: Path, data_dir: Path | None = None) -> dict[str, Any]:
    """Return the arguments of `build` for the network of a run.

    A run of version 0.1.0 did not record them. They are then derived from its data set, which is read.

    Arguments:
        folder: Folder of the run.
        data_dir: Folder of that data set; by default the one that the run recorded.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it has no {path.name}")
    config = read_json(path)
    try:
        if "network" in config:
            return dict(config["network"])
        recorded = config.get("data_dir")
        training, _ = data.load(config["data"], data_dir or (Path(recorded) if recorded else None))
        return build_arguments(config["model"], training.first(config.get("examples", 0)))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a network: {error!r}") from error


def build_arguments(spec: dict[str, Any], split: data.Split) -> dict[str, Any]:
    """Return the arguments of `build` for the images of a data set.

    Arguments:
        spec: Arguments that do not depend on the data, and `normalize`: "none", "center" to subtract the mean of the
            images, or "standardize" to divide by their standard deviation as well.
        split: Training images.
    """
    _, channels, *size = split.images.shape
    classes = int(split.labels.max()) + 1 if split.classes is None else len(split.classes)
    arguments = dict(spec)
    normalize = arguments.pop("normalize", "center")
    if normalize not in ("none", "center", "standardize"):
        raise ValueError(f"normalize must be 'none', 'center' or 'standardize', got {normalize!r}")
    if normalize != "none":
        arguments["mean"] = split.images.mean((0, 2, 3)).tolist()
    if normalize == "standardize":
        arguments["std"] = split.images.std((0, 2, 3)).tolist()
    return {**arguments, "in_channels": channels, "image_size": size, "classes": classes}


def pretrained(name: str) -> nn.Sequential:
    """Open a network that comes with the package, in eval mode. Its `card` says how it was trained.

    Arguments:
        name: One of `PRETRAINED`.

    Raises:
        CheckpointError: If the file is damaged, or is not the one that this version of the package came with.

    >>> model = pretrained("kwlarge_cayley_cifar10")
    >>> model.training
    False
    """
    tensors, about = _open(name)
    return _assemble(about["model"], _path(name), tensors, _path(name), about)


def card(name: str) -> dict[str, Any]:
    """Return how a network of the package was trained, and its accuracy: clean, certified and under attack.

    Arguments:
        name: One of `PRETRAINED`.

    >>> card("kwlarge_cayley_cifar10")["model"]["name"]
    'kwlarge'
    """
    return _open(name)[1]


def _assemble(
    arguments: Any, source: Path, tensors: dict[str, Tensor], weights: Path, about: dict[str, Any]
) -> nn.Sequential:
    """Build a network, read its weights, and tell it the names of its classes that `about` has."""
    try:
        model = build(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} has no network that can be built: {error}") from error
    load_into(weights, model, tensors)
    size = pair("image_size", arguments.get("image_size", 32))
    return describe(model, (arguments.get("in_channels", 3), *size), _names(arguments, about, source)).eval()


def _names(arguments: dict[str, Any], about: dict[str, Any], source: Path) -> tuple[str, ...] | None:
    """Return the names of the classes that a run recorded under "classes", or else those of its data set."""
    count, recorded = arguments.get("classes", 10), about.get("classes")
    if recorded is None:
        known = class_names(str(about.get("data")))
        return known if known is not None and len(known) == count else None
    if not isinstance(recorded, list) or not all(isinstance(n, str) for n in recorded) or len(recorded) != count:
        raise ValueError(f"{source} must have {count} names of classes, or none, got {recorded!r}")
    return tuple(recorded)


def _open(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if name not in PRETRAINED:
        raise ValueError(f"name must be one of {', '.join(map(repr, PRETRAINED))}, got {name!r}")
    with as_file(_path(name)) as path:
        tensors, header = read(path)
    if (digest := sha256(tensors)) != PRETRAINED[name]:
        raise CheckpointError(f"{path} has weights with the SHA-256 {digest}, not {PRETRAINED[name]}; install again")
    about: dict[str, Any] = header["state"]
    return tensors, about


def _path(name: str) -> Any:
    return files("orthoconv.models").joinpath(f"{name}.safetensors")
