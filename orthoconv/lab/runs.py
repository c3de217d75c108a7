"""A run: a folder with its configuration, metrics, checkpoints and weights."""

__all__ = ["ModelSpec", "Run", "append_record", "digest", "hardware", "read_json", "run_record"]

import hashlib
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from orthoconv import __version__, models
from orthoconv.data import Split
from orthoconv.files import write_atomically
from orthoconv.train import load_weights


@dataclass(frozen=True)
class ModelSpec:
    """Arguments of `orthoconv.models.build` that do not follow from the data.

    Attributes:
        name: kwlarge, resnet9 or wide_resnet10_10.
        conv: cayley, bcop, cayley_bcop, rko, crko, ossn, svcm or plain.
        linear: cayley, bjorck or plain; by default what the paper has with the convolution.
        width: Factor of the numbers of channels.
        kernel_size: Taps of the convolutions.
        strided_kernel_size: Taps of the strided convolutions of kwlarge.
        lipschitz: Bound that the layers share.
        learned_scale: Whether the scale g of Cayley layers is learned.
        normalize: What the first layer does with the statistics of the training images: none, center (subtract the
            mean, which leaves distances as they are), or standardize (divide by the deviation, too).
    """

    name: str = "kwlarge"
    conv: str = "cayley"
    linear: str | None = None
    width: float = 1
    kernel_size: int = 3
    strided_kernel_size: int | None = None
    lipschitz: float = 1.0
    learned_scale: bool = True
    normalize: Literal["none", "center", "standardize"] = "center"

    def build(self, data: Split) -> nn.Sequential:
        """The network for images such as those of `data`, from which it takes its statistics."""
        return models.build(**self.options(data))

    def options(self, data: Split) -> dict[str, Any]:
        """Arguments of `orthoconv.models.build`."""
        _, channels, *size = data.images.shape
        options = asdict(self)
        normalize = options.pop("normalize")
        if normalize not in ("none", "center", "standardize"):
            raise ValueError(f"normalize must be 'none', 'center' or 'standardize', got {normalize!r}")
        if normalize != "none":
            options["mean"] = data.images.mean((0, 2, 3)).tolist()
        if normalize == "standardize":
            options["std"] = data.images.std((0, 2, 3)).tolist()
        classes = int(data.labels.max()) + 1
        return {**options, "in_channels": channels, "image_size": size, "classes": classes}


class Run:
    """The folder of a run, by what is in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config_path = folder / "config.json"
        self.metrics_path = folder / "metrics.jsonl"
        self.checkpoint_path = folder / "checkpoint.safetensors"
        self.initial_path = folder / "initial.safetensors"
        self.weights_path = folder / "model.safetensors"
        self.evaluation_path = folder / "evaluation.json"
        self.evidence_path = folder / "evaluation.safetensors"

    @property
    def config(self) -> dict[str, Any]:
        """What the run was started with."""
        if not self.config_path.is_file():
            raise FileNotFoundError(f"{self.folder} is not the folder of a run: it has no {self.config_path.name}")
        config = read_json(self.config_path)
        for key, kind in (("data", str), ("model", dict), ("recipe", dict), ("hardware", dict)):
            if not isinstance(config.get(key), kind):
                raise ValueError(f"{self.config_path} is not the configuration of a run: {key} is {config.get(key)!r}")
        if not isinstance(config["model"].get("conv"), str):
            raise ValueError(f"{self.config_path} is not the configuration of a run: its model has no conv")
        return config

    def metrics(self) -> list[dict[str, Any]]:
        """The figures of each epoch so far."""
        if not self.metrics_path.exists():
            return []
        try:
            lines = self.metrics_path.read_text().split("\n")[:-1]  # what ends without a newline was not all written
            found: list[dict[str, Any]] = [json.loads(line) for line in lines]
            if not all(isinstance(m, dict) and isinstance(m.get("step"), int) for m in found):
                raise ValueError("a line has no step of an epoch")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.metrics_path} is damaged: {error}") from error
        return found

    def write_metrics(self, metrics: list[dict[str, Any]]) -> None:
        """Write the figures of all epochs so far; a full disk leaves those that were there."""
        text = "".join(json.dumps(m) + "\n" for m in metrics)
        write_atomically(self.metrics_path, lambda file: file.write(text.encode()))

    def load_model(self, data: Split, path: Path | None = None) -> nn.Sequential:
        """The network of the run with its weights, or with those of another file of the run."""
        try:
            model = ModelSpec(**self.config["model"]).build(data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.config_path} has no model that can be built: {error}") from error
        load_weights(path or self.weights_path, model)
        return model.eval()


def run_record(run: Run) -> dict[str, Any]:
    """Everything that the folder of a run says of it."""
    config = run.config
    training_on = config.pop("hardware")
    return {
        "config": config,
        "hash": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16],
        "seed": config["recipe"].get("seed", 0),
        "hardware": training_on,
        "seconds": sum(m.get("seconds", 0) for m in run.metrics()),
        "epochs": run.metrics(),
        "evaluation": read_json(run.evaluation_path),
    }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or a ValueError with its path."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it has {type(found).__name__} where an object should be")
    return found


def digest(config: dict[str, Any]) -> str:
    """Digest of a configuration, in which 1 and 1.0 are the same.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1.0})
    True
    """
    return hashlib.sha256(json.dumps(_canonical(config), sort_keys=True).encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one line to a file of results; a full disk leaves those that were there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        if path.exists():
            os.truncate(path, size)  # half a line would spoil the next one, too
        error.filename = error.filename or str(path)
        raise


def hardware() -> dict[str, Any]:
    """What ran: machine, versions, commit."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "orthoconv": __version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the checkout that this file is in, if it is in one, with + if it has been changed."""
    here = Path(__file__).parent
    try:
        ask = {"cwd": here, "capture_output": True, "text": True, "timeout": 10}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **ask)  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **ask)  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "") if commit.returncode == 0 else None
