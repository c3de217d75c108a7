"""A model as plain modules of real arithmetic, which ONNX, torch.export and torch.compile take as they are."""

__all__ = ["export"]

import copy
from collections.abc import Sequence

import torch
from torch import nn

from orthoconv.certificates.trust import require_copyable, require_replaceable
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.modules import leaf_inputs, replace_modules, uncompiled, zeros_for
from orthoconv.nn.image_layer import ImageLayer
from orthoconv.nn.layer import Layer
from orthoconv.nn.reparametrized import frozen


def export(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """Copy `model`, with each layer of this library in plain form for inputs of one shape: nothing in it is complex.

    Operators are fixed as in eval mode, and are not trained. A convolution by a kernel becomes torch's, with circular
    padding; one that is made in the Fourier domain becomes a Fourier transform by products with real matrices.

    Arguments:
        model: Any model; what is not of this library is copied as it is. A layer with hooks, or with methods that its
            plain form would leave out, is refused.
        input_shape: Shape of one input, without the batch, which stays free.

    Returns:
        A copy in eval mode, equal to ``model.eval()`` up to rounding.

    >>> from orthoconv.nn import CayleyConv2d, MaxMin
    >>> model = nn.Sequential(CayleyConv2d(3, 8, 3), MaxMin()).eval()
    >>> plain, x = export(model, (3, 8, 8)), torch.rand(2, 3, 8, 8)
    >>> torch.dist(plain(x), model(x)).item() < 1e-5
    True
    """
    model = uncompiled(unwrapped(model))
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError(f"{type(model).__name__} is scripted, or a part of it is; export what it was made from")
    require_copyable(model)
    model = copy.deepcopy(model).eval().requires_grad_(False)
    shapes = _shapes(model, input_shape)
    with torch.no_grad(), frozen(model):
        layers = [(name, m) for name, m in model.named_modules() if isinstance(m, Layer)]
        plain: dict[nn.Module, nn.Module] = {m: m.exported(_shape_of(m, name, shapes)) for name, m in layers}
    for name, layer in layers:
        if plain[layer] is not layer:
            require_replaceable(layer, "exported", name or type(layer).__name__)
    x = zeros_for(model, input_shape)
    replace_modules(model, plain)
    model = plain.get(model, model).eval()
    try:
        model(x)
    except AttributeError as error:  # such as layer.inverse
        raise TypeError(f"export keeps the forward pass of each layer, and nothing else of it: {error}") from error
    return model


def _shapes(model: nn.Module, input_shape: Sequence[int]) -> dict[nn.Module, torch.Size]:
    """Shape of one input of each layer; a convolution may see just one."""
    shapes: dict[nn.Module, torch.Size] = {}
    for _, module, x in leaf_inputs(model, zeros_for(model, input_shape)):
        shape = x.shape[1:]
        if shapes.setdefault(module, shape) != shape and isinstance(module, ImageLayer):
            raise ValueError(
                f"export takes layers that see images of one size; {module} sees {shape} and {shapes[module]}"
            )
    return shapes


def _shape_of(layer: Layer, name: str, shapes: dict[nn.Module, torch.Size]) -> Sequence[int]:
    if layer not in shapes and isinstance(layer, ImageLayer):
        raise ValueError(f"export needs every convolution to be used in the forward pass; {name} ({layer}) is not")
    return shapes.get(layer, ())
