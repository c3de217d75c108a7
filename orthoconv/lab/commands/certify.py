"""`orthoconv certify`: the class and the certified radius of image files."""

__all__ = ["certify"]

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from orthoconv.data import DataError
from orthoconv.data.pictures import as_images
from orthoconv.devices import choose_device
from orthoconv.lab.file_arguments import picture_files
from orthoconv.lab.opening import open_model
from orthoconv.margins import radius_text
from orthoconv.models.describing import description_of
from orthoconv.predicting import predict

_CHUNK = 1000
_FIELDS = ("file", "index", "class", "margin", "radius")


def certify(
    model: str,
    files: list[str],
    format: Literal["table", "json", "csv"] = "table",  # noqa: A002
    resize: bool = False,
    device: str = "auto",
    local: bool = False,
) -> None:
    """Say the class of each image, and the radius within which no image has another class.

    Exits with status 1 if an image cannot be read; the others are certified all the same.

    Example: orthoconv certify runs/digits a.png folder --resize

    Args:
        model: Folder of a run, a .safetensors file, or the name of a network that comes with the package.
        files: Image files, folders of them, or - for the standard input.
        format: table, json or csv.
        resize: Scale images of another size to that of the network. Without it, they are refused.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        local: Look for larger radii by local certificates, for networks of affine layers and MaxMin. It takes longer.
    """
    network = open_model(model).to(choose_device(device))
    faults: list[str] = []
    rows = list(_rows(network, picture_files(files), resize, faults, local))
    if format == "json":
        print(json.dumps(rows, indent=2))
    else:
        print(_csv(rows) if format == "csv" else _table(rows))
    if faults:
        print("\n".join(f"orthoconv: {_printable(fault)}" for fault in faults), file=sys.stderr)
        raise DataError(f"{len(faults)} of {len(faults) + len(rows)} images could not be certified")


def _rows(
    network: nn.Module, files: Iterable[tuple[str, Path | bytes]], resize: bool, faults: list[str], local: bool
) -> Iterator[dict[str, Any]]:
    """Yield the facts about each image; what cannot be read is added to the faults."""
    images = _images(network, files, resize, faults)
    while part := list(islice(images, _CHUNK)):
        predictions = predict(network, torch.cat([x for _, x in part]), local=local)
        for (name, _), one in zip(part, predictions, strict=True):
            values = (name, one.index, one.name, _number(one.margin), _number(one.radius))
            yield dict(zip(_FIELDS, values, strict=True))


def _images(
    network: nn.Module, files: Iterable[tuple[str, Path | bytes]], resize: bool, faults: list[str]
) -> Iterator[tuple[str, Tensor]]:
    shape = description_of(network).input_shape
    for name, source in files:
        try:
            yield name, as_images(source, shape, resize)
        except (DataError, ValueError, TypeError) as error:
            text = str(error).replace("resize=True scales", "--resize scales")
            faults.append(text if name in text else f"{name}: {text}")


def _number(value: float) -> float | None:
    """Return a number that JSON has: the largest one for infinity, and none if there is no number.

    >>> _number(math.inf), _number(math.nan)
    (1.7976931348623157e+308, None)
    """
    return None if math.isnan(value) else min(max(value, -sys.float_info.max), sys.float_info.max)


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().removesuffix("\n")


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [("file", "class", "margin", "radius")]
    for row in rows:
        label = str(row["index"]) if row["class"] is None else f"{row['class']} ({row['index']})"
        margin = "-" if row["margin"] is None else f"{row['margin']:.4f}"
        radius = "-" if row["radius"] is None else radius_text(row["radius"])
        cells.append((_printable(row["file"]), _printable(label), margin, radius))
    widths = [max(len(line[k]) for line in cells) for k in range(4)]
    lines = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in cells]
    return "\n".join([*lines, "No image nearer than its radius (l2, pixels in [0, 1]) has another class."])


def _printable(text: str) -> str:
    """Replace what a terminal might take for a command, in the name of a file.

    >>> _printable("a\\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(c if c.isprintable() else "?" for c in text)
