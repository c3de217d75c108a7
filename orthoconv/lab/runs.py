"""A run: a folder with its configuration, metrics, checkpoints and weights."""

__all__ = ["Run"]

import json
from pathlib import Path
from types import NoneType
from typing import Any

from torch import nn

from orthoconv.data import OWN, DataError, Split, load
from orthoconv.files import read_json, write_atomically
from orthoconv.lab.configs import Training
from orthoconv.lab.progress import download_bar
from orthoconv.models.trained import open_network, run_arguments

_TYPES: dict[str, Any] = {"data": str, "data_dir": (str, NoneType), "model": dict, "recipe": dict, "hardware": dict}
_TYPES["classes"] = (list, NoneType)  # a run of version 0.1.0 has none


class Run:
    """The folder of a run.

    Arguments:
        folder: The folder, which need not exist yet.
        data_dir: Folder of its data set; by default the one that the run recorded.
    """

    def __init__(self, folder: Path, data_dir: Path | None = None) -> None:
        self.folder, self._data_dir = folder, data_dir
        self.config_path = folder / "config.json"
        self.metrics_path = folder / "metrics.jsonl"
        self.checkpoint_path = folder / "checkpoint.safetensors"
        self.initial_path = folder / "initial.safetensors"
        self.weights_path = folder / "model.safetensors"
        self.evaluation_path = folder / "evaluation.json"
        self.evidence_path = folder / "evaluation.safetensors"

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        if not self.config_path.is_file():
            raise FileNotFoundError(f"{self.folder} is not the folder of a run: it has no {self.config_path.name}")
        config = read_json(self.config_path)
        for key, types in _TYPES.items():
            if not isinstance(config.get(key), types):
                raise ValueError(f"{self.config_path} is not the configuration of a run: {key} is {config.get(key)!r}")
        if not all(isinstance(name, str) for name in config.get("classes") or ()):
            raise ValueError(f"{self.config_path} is not the configuration of a run: a name of its classes is no text")
        if not isinstance(config["model"].get("conv"), str):
            raise ValueError(f"{self.config_path} is not the configuration of a run: its model has no conv")
        return config

    @property
    def training(self) -> Training:
        """What the weights of the run depend on."""
        config = self.config
        try:
            return Training.of(config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.config_path} is not the configuration of a run: {error}") from error

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, if the run knows them."""
        names: list[str] | None = self.config.get("classes")
        return names

    def load_data(self, split: float | None = None) -> tuple[Split, Split]:
        """Load the training and the test split, with the classes and the size of the images that the run had.

        If the folder of the run holds other images by now, its division has changed, and the test images may be images
        that the network was trained on. Then this raises a `DataError`.

        Arguments:
            split: Share of one's own images that are test images; by default that of the run. With 1, all are.
        """
        config, training = self.config, self.training
        recorded = config.get("data_dir")
        folder = self._data_dir or (Path(recorded) if recorded else None)
        reading = {**training.reading, **({} if split is None else {"split": split})}
        classes = self.classes if training.data in OWN else None
        train, test = load(training.data, folder, download_bar(), classes=classes, **reading)
        known = config.get("images") if self._data_dir is None and split is None else None  # a run of before has none
        if known is not None and test.fingerprint != known["test"]:
            raise DataError(
                f"{folder} has other images than when {self.folder} was trained, so its test images may be images that "
                f"the network has seen; train again, or pass a folder of new images as --data_dir, with --split 1"
            )
        return train, test

    def load_model(self, weights: Path | None = None) -> nn.Sequential:
        """Open the network of the run in eval mode, with its trained weights or those of another file of the run."""
        return open_network(run_arguments(self.folder, self._data_dir), weights or self.weights_path, self.config_path)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        arguments = {"in_channels": 3, "image_size": 32, **run_arguments(self.folder, self._data_dir)}
        size = arguments["image_size"]
        h, w = (size, size) if isinstance(size, int) else size
        return arguments["in_channels"], h, w

    def metrics(self) -> list[dict[str, Any]]:
        """Read the figures of each epoch so far."""
        if not self.metrics_path.exists():
            return []
        try:
            lines = self.metrics_path.read_text().split("\n")[:-1]  # a last line without a newline is incomplete
            metrics: list[dict[str, Any]] = [json.loads(line) for line in lines]
            if not all(isinstance(m, dict) and isinstance(m.get("step"), int) for m in metrics):
                raise ValueError("a line has no step of an epoch")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.metrics_path} is damaged: {error}") from error
        return metrics

    def add_metrics(self, figures: dict[str, Any]) -> None:
        """Write the figures of an epoch in place of any of the same or a later one; a full disk changes nothing."""
        metrics = [m for m in self.metrics() if m["step"] < figures["step"]]
        text = "".join(json.dumps(m) + "\n" for m in [*metrics, figures])
        write_atomically(self.metrics_path, text.encode())
