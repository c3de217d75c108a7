"""`orthoconv export`: a trained run as an ONNX file, or as one of torch.export."""

__all__ = ["export"]

import logging
import warnings
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from orthoconv.data import load
from orthoconv.export import export as plain_modules
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import Run


def export(
    run: Path,
    out: Path | None = None,
    format: Literal["onnx", "pt2"] = "onnx",  # noqa: A002
    data_dir: Path | None = None,
) -> None:
    """Write the network of a run as a file of real arithmetic: images in, logits out, any number of images.

    Args:
        run: Folder of the run.
        out: File to write; by default model.onnx or model.pt2 in the folder.
        format: onnx, or pt2 for torch.export.
        data_dir: Where the data set is, from which the shape of an image is known.
    """
    folder = Run(run)
    training, test = load(folder.config["data"], data_dir, download_bar())
    model, x = folder.load_model(training), test.images[:8]
    plain = plain_modules(model, x.shape[1:])
    path = out or folder.folder / f"model.{format}"
    write_onnx(plain, x, path) if format == "onnx" else write_pt2(plain, x, path)
    with torch.no_grad():
        difference = (plain(x) - model(x)).abs().max().item()
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, largest difference to the model {difference:.1e}")


def write_onnx(plain: nn.Module, x: torch.Tensor, path: Path) -> None:
    """The module as an ONNX file, for any number of images such as those of x."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError('ONNX needs onnx and onnxscript: pip install "orthoconv[export]"') from error
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")  # which misses torchvision
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                plain, (x,), dynamo=True, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False,
                input_names=["images"], output_names=["logits"],
            )  # fmt: skip
    finally:
        logger.setLevel(level)
    assert program is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(path, external_data=False)


def write_pt2(plain: nn.Module, x: torch.Tensor, path: Path) -> None:
    """The module as a file of torch.export, for any number of images such as those of x."""
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
