"""`orthoconv export`: write the network of a run as an ONNX file, or as one of torch.export."""

__all__ = ["export"]

from pathlib import Path
from typing import Literal

import torch

from orthoconv.devices import move
from orthoconv.exporting import export as plain_modules
from orthoconv.lab.machine import use_device
from orthoconv.lab.runs import Run
from orthoconv.onnx_files import to_onnx


def export(
    run: Path,
    out: Path | None = None,
    format: Literal["onnx", "pt2"] = "onnx",  # noqa: A002
    device: str = "auto",
    data_dir: Path | None = None,
) -> None:
    """Write the network of a run as a file of real arithmetic: images in, logits out, any number of images.

    Where that is possible, an ONNX file has the logits in float64 as well, and in its metadata what certified radii
    need; see docs/predicting.md.

    Example: orthoconv export runs/digits --out digits.onnx

    Args:
        run: Folder of the run.
        out: File to write; by default model.onnx or model.pt2 in the folder.
        format: onnx, or pt2 for torch.export.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        data_dir: Folder of the data set, which only a run of version 0.1.0 is opened with; by default the one of the
            run.
    """
    folder = Run(run, data_dir)
    model = folder.load_model().to(use_device(device))
    x = torch.rand(8, *folder.input_shape, generator=torch.Generator().manual_seed(0))
    plain = plain_modules(model, x.shape[1:]).cpu()
    path = out or folder.folder / f"model.{format}"
    certificate = ""
    if format == "onnx":
        certificate = ", with" if to_onnx(model, x, path, certificate=None) else ", without"
        certificate += " what certificates need"
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), path)
    with torch.no_grad():
        difference = (plain(x) - model(*move(model, x)).cpu()).abs().max().item()
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, largest difference to the model {difference:.1e}{certificate}")
