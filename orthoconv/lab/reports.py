"""One page that shows the results of a run, from the files of the run alone."""

__all__ = ["write_report"]

import base64
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jinja2 import UndefinedError
from matplotlib import image as mpl_image
from safetensors.torch import load_file
from torch import Tensor, nn

from orthoconv.certificates import singular_values
from orthoconv.files import read_json
from orthoconv.lab import plots
from orthoconv.lab.pages import render
from orthoconv.lab.runs import Run
from orthoconv.modules import leaf_inputs


def write_report(
    run: Path,
    compare: list[Path],
    device: torch.device = torch.device("cpu"),  # noqa: B008
    data_dir: Path | None = None,
) -> Path:
    """Write report.html into the folder of a run, with other runs beside it, and return its path.

    Arguments:
        run: Folder of the run.
        compare: Folders of the others.
        device: Device that computes singular values.
        data_dir: Folder of the data set of the first run, which only a run of version 0.1.0 is opened with.
    """
    folders = [Run(run, data_dir), *(Run(path) for path in compare)]
    for folder in folders:
        if not folder.evaluation_path.is_file():
            raise FileNotFoundError(f"{folder.folder} has no evaluation; run: orthoconv evaluate {folder.folder}")
    try:
        page = _page(folders, device)
    except (LookupError, TypeError, AttributeError, RuntimeError, UndefinedError) as error:
        raise ValueError(f"{run} lacks what a report shows; evaluate it again: {error!r}") from error
    path = run / "report.html"
    path.write_text(page)
    return path


def _page(folders: list[Run], device: torch.device) -> str:
    main, labels = folders[0], _labels(folders)
    rows = {label: read_json(folder.evaluation_path) for label, folder in zip(labels, folders, strict=True)}
    evidence = {label: _evidence(folder.evidence_path) for label, folder in zip(labels, folders, strict=True)}
    return render(
        "report.html.j2",
        title=f"{main.config['model']['name']} with {_method(main)} layers on {main.config['data']}",
        rows=rows,
        config=json.dumps({k: main.config[k] for k in ("data", "model", "recipe")}, indent=2),
        hardware=rows[labels[0]]["hardware"],
        training=plots.training_curves(main.metrics()),
        certified=plots.certified_curves(
            {name: e["radius"] for name, e in evidence.items()},
            {name: {"0": r["attacked_clean"], **r["pgd_curve"]} for name, r in rows.items()},
        ),
        layers=_layers(main, device),
        gallery=_gallery(evidence[labels[0]], rows[labels[0]].get("classes")),
        epochs=main.metrics(),
    )


def _evidence(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # whatever a file of any bytes makes the parser raise
        raise ValueError(f"{path} is damaged: {error}") from error


def _method(run: Run) -> str:
    return str(run.config["model"]["conv"])


def _labels(runs: list[Run]) -> list[str]:
    """Name each run by its method; where two have the same, by its folder, too."""
    methods, folders = Counter(map(_method, runs)), Counter(run.folder.name for run in runs)
    labels = []
    for run in runs:
        folder = run.folder.name if folders[run.folder.name] == 1 else str(run.folder)
        labels.append(_method(run) if methods[_method(run)] == 1 else f"{_method(run)}, {folder}")
    return labels


def _layers(run: Run, device: torch.device) -> list[dict[str, Any]]:
    """Return the range of the singular values of each layer, before and after training."""
    image, paths = torch.zeros(1, *run.input_shape, device=device), (run.initial_path, run.weights_path)
    before, after = (_ranges(run.load_model(path).to(device), image) for path in paths)
    return [{"name": a["name"], "before": b["range"], "after": a["range"]} for b, a in zip(before, after, strict=True)]


@torch.no_grad()
def _ranges(model: nn.Sequential, x: Tensor) -> list[dict[str, Any]]:
    rows = []
    for _, module, y in leaf_inputs(model, x):
        values = singular_values(module, y.shape[1:])
        if values is not None:
            rows.append({"name": str(module), "range": (float(values.min()), float(values.max()))})
    return rows


def _gallery(evidence: dict[str, Tensor], classes: list[str] | None) -> list[dict[str, Any]]:
    """Return what the cards of the gallery show; classes by their names, if these are known."""
    keys = ("images", "adversarial", "labels", "classes", "radius", "distance")
    columns = [evidence[f"gallery_{key}"] for key in keys]

    def name(label: Tensor) -> str:
        return str(int(label)) if classes is None else classes[int(label)]

    shown: list[Callable[[Tensor], Any]] = [_png, _png, name, name, float, float]
    return [
        {key: show(value) for key, show, value in zip(keys, shown, values, strict=True)}
        for values in zip(*columns, strict=True)
    ]


def _png(image: Tensor) -> str:
    """Return an image (c, h, w) in [0, 1] as a data URI."""
    pixels = image.expand(3, -1, -1).clamp(0, 1).permute(1, 2, 0)
    buffer = io.BytesIO()
    mpl_image.imsave(buffer, pixels.numpy(), format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
