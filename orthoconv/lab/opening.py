"""Networks that a command can be asked about: of the package, of a run, or of a published file."""

__all__ = ["open_model"]

from pathlib import Path

from torch import nn

from orthoconv import models


def open_model(model: str) -> nn.Sequential:
    """Open a network in eval mode.

    Arguments:
        model: Name of a network that comes with the package, folder of a run, or a .safetensors file of a network.

    >>> open_model("kwlarge_cayley_cifar10").class_names[0]
    'airplane'
    """
    if model in models.PRETRAINED:
        return models.pretrained(model)
    if not Path(model).exists():
        names = ", ".join(models.PRETRAINED)
        raise FileNotFoundError(f"{model} is neither the folder of a run, nor a .safetensors file, nor one of {names}")
    return models.load(model)
