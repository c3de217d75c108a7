"""`orthoconv report`: one page that shows what a run came to. A function of the files of the run alone."""

__all__ = ["report"]

import base64
import io
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, UndefinedError
from matplotlib import image as mpl_image
from safetensors.torch import load_file
from torch import Tensor, nn

from orthoconv.data import load
from orthoconv.lab import plots
from orthoconv.lab.runs import Run, read_json
from orthoconv.nn.base import BaseConv2d
from orthoconv.nn.linear import BaseLinear
from orthoconv.tracing import calls


def report(run: Path, compare: list[Path] | None = None, data_dir: Path | None = None) -> None:
    """Write report.html into the folder of a run: curves, certificates, attacks, singular values, a gallery.

    Args:
        run: Folder of the run, evaluated.
        compare: Folders of other runs to put beside it, evaluated.
        data_dir: Where the data set is; by default where it usually is.
    """
    print(f"report: {write_report(run, compare or [], data_dir)}")


def write_report(run: Path, compare: list[Path], data_dir: Path | None = None) -> Path:
    """The page, written; its path."""
    folders = [Run(run), *(Run(path) for path in compare)]
    for folder in folders:
        if not folder.evaluation_path.is_file():
            raise FileNotFoundError(f"{folder.folder} has no evaluation; run: orthoconv evaluate {folder.folder}")
    main = folders[0]
    try:
        page = _page(main, folders, data_dir)
    except (LookupError, TypeError, AttributeError, RuntimeError, UndefinedError) as error:
        raise ValueError(f"{run} lacks what a report shows; evaluate it again: {error!r}") from error
    path = run / "report.html"
    path.write_text(page)
    return path


def _page(main: Run, folders: list[Run], data_dir: Path | None) -> str:
    rows = {_name(folder): read_json(folder.evaluation_path) for folder in folders}
    evidence = {_name(folder): _evidence(folder.evidence_path) for folder in folders}
    template = files("orthoconv.lab").joinpath("report.html.j2").read_text()
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template).render(
        title=f"{main.config['model']['name']} with {_name(main)} layers on {main.config['data']}",
        rows=rows,
        config=json.dumps({k: main.config[k] for k in ("data", "model", "recipe")}, indent=2),
        hardware=rows[_name(main)]["hardware"],
        training=plots.training_curves(main.metrics()),
        certified=plots.certified_curves(
            {name: e["radius"] for name, e in evidence.items()},
            {name: {"0": r["attacked_clean"], **r["pgd_curve"]} for name, r in rows.items()},
        ),
        layers=_layers(main, data_dir),
        gallery=_gallery(evidence[_name(main)]),
        epochs=main.metrics(),
    )  # fmt: skip


def _evidence(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # whatever a file of any bytes makes the parser raise
        raise ValueError(f"{path} is damaged: {error}") from error


def _name(run: Run) -> str:
    return str(run.config["model"]["conv"])


def _layers(run: Run, data_dir: Path | None) -> list[dict[str, Any]]:
    """Range of the singular values of each layer, before and after training."""
    training, _ = load(run.config["data"], data_dir)
    before, after = (_ranges(run.load_model(training, path), training.images[:1]) for path in (run.initial_path, None))
    return [{"name": a["name"], "before": b["range"], "after": a["range"]} for b, a in zip(before, after, strict=True)]


@torch.no_grad()
def _ranges(model: nn.Sequential, x: Tensor) -> list[dict[str, Any]]:
    rows = []
    for _, module, y in calls(model, x):
        if isinstance(module, BaseConv2d):
            values = module.singular_values((y.shape[-2], y.shape[-1]))
        elif isinstance(module, BaseLinear | nn.Linear):
            matrix = module.recall() if isinstance(module, BaseLinear) else module.weight
            values = torch.linalg.svdvals(matrix.double())
        else:
            continue
        rows.append({"name": str(module), "range": (float(values.min()), float(values.max()))})
    return rows


def _gallery(evidence: dict[str, Tensor]) -> list[dict[str, Any]]:
    keys = ("images", "adversarial", "labels", "classes", "radius", "distance")
    columns = [evidence[f"gallery_{key}"] for key in keys]
    return [
        {
            "image": _png(image),
            "adversarial": _png(adversarial),
            "label": int(label),
            "class": int(changed),
            "radius": float(radius),
            "distance": float(distance),
        }
        for image, adversarial, label, changed, radius, distance in zip(*columns, strict=True)
    ]


def _png(image: Tensor) -> str:
    """An image (c, h, w) in [0, 1] as a data URI."""
    pixels = image.expand(3, -1, -1).clamp(0, 1).permute(1, 2, 0)
    buffer = io.BytesIO()
    mpl_image.imsave(buffer, pixels.numpy(), format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
