"""Files of plain torch modules: ONNX, or torch.export."""

__all__ = ["write_onnx", "write_pt2"]

import logging
import warnings
from pathlib import Path

import torch
from torch import nn


def write_onnx(plain: nn.Module, x: torch.Tensor, path: Path) -> None:
    """Write a module of real arithmetic as an ONNX file, for any number of images of the shape of x."""
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
    """Write a module as a file of torch.export, for any number of images of the shape of x."""
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
