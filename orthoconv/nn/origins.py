"""Layers of torch, and the layers of this library that take their places."""

__all__ = ["arguments_of", "block_kernel", "orthogonal", "remade"]

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from orthoconv.nn.geometry import Geometry
from orthoconv.nn.methods import find_layer, linear_method, require_method

_KINDS: dict[type[nn.Module], str] = {
    nn.Conv2d: "conv",
    nn.ConvTranspose2d: "transposed",
    nn.Linear: "linear",
    nn.Conv1d: "conv1d",
    nn.Conv3d: "conv3d",
}


def orthogonal(
    layer: nn.Module, method: str | Callable[..., nn.Module] = "cayley", *, keep_weights: bool = False, **options: Any
) -> nn.Module:
    """Return the layer of a method, by default Cayley's, that takes the place of a layer of torch.

    It has the arguments of the old layer, its dtype, device and mode; the old one stays as it is. A convolution of
    torch pads by zeros unless told otherwise, which loses norm at the border: ``padding_mode="circular"`` keeps it.

    Arguments:
        layer: An nn.Conv2d, nn.ConvTranspose2d, nn.Linear, nn.Conv1d or nn.Conv3d.
        method: Name of a method (`conv_methods`, `linear_methods`), or a class of layers.
        keep_weights: Whether to start near the orthogonal layer that is nearest to the old one, with its bias;
            otherwise the weights are new. See `ImageLayer.start_from` for how near.
        options: Arguments of the new layer that are to differ from those of the old one, or that the old one lacks.

    Raises:
        ValueError: If the method has no such layer, or none with these arguments; the message says what it takes.

    >>> orthogonal(nn.Conv2d(3, 8, 3, padding=1))
    CayleyConv2d(3, 8, kernel_size=(3, 3), padding_mode=zeros)
    >>> orthogonal(nn.Linear(8, 4), "bjorck", keep_weights=True)
    BjorckLinear(in_features=8, out_features=4, bias=True)
    """
    kind = next((name for base, name in _KINDS.items() if isinstance(layer, base)), None)
    if kind is None:
        known = ", ".join(f"nn.{base.__name__}" for base in _KINDS)
        raise TypeError(f"orthogonal takes a layer of torch, one of {known}; got {layer!r}")
    if not isinstance(method, str):
        return remade(layer, method, keep_weights=keep_weights, **options)
    require_method(method)
    make = linear_method(None, method) if kind == "linear" else find_layer(method, kind)
    return remade(layer, make, keep_weights=keep_weights, **options)


def remade(
    layer: nn.Module, make: Callable[..., nn.Module], *, keep_weights: bool = False, **options: Any
) -> nn.Module:
    """Return `make(...)` with the arguments of a layer of torch, changed by the options; see `orthogonal`."""
    arguments: dict[str, Any] = arguments_of(layer) | options
    try:
        new = make(**arguments)
    except ValueError as error:
        name = getattr(getattr(make, "func", make), "__name__", repr(make))
        raise ValueError(
            f"no {name} takes the place of {layer}: {error}. An orthogonal layer divides the sides of an image by its "
            f'stride, no more and no less; options replace arguments, such as padding="same", padding_mode="circular"'
        ) from error
    if keep_weights:
        _start(new, layer)
    return new.train(layer.training)


def arguments_of(layer: nn.Module) -> dict[str, Any]:
    """Return the arguments that a layer of torch was made with, its dtype and device among them.

    >>> arguments_of(nn.Linear(2, 3, bias=False))["out_features"]
    3
    """
    weight = layer.weight
    if not isinstance(weight, Tensor) or isinstance(weight, UninitializedParameter):
        raise ValueError(f"{layer} has no weight yet; let it see an input first")
    shared = {"bias": layer.bias is not None, "device": weight.device, "dtype": weight.dtype}
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features, **shared}
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
    if isinstance(layer, nn.ConvTranspose2d):
        names.append("output_padding")
    arguments = {name: getattr(layer, name) for name in names} | shared
    if arguments["padding"] == "valid":
        arguments["padding"] = (0,) * len(arguments["kernel_size"])
    return arguments


def block_kernel(kernel: Tensor, geometry: Geometry) -> Tensor:
    """Rearrange the kernel (o, i / groups, *k) of a plain convolution for blocks of pixels, as the layer has it.

    The plain convolution has the stride, dilation and padding of the geometry. Taps that read pixels of blocks which
    the layer does not read are left out; there are none without stride.

    >>> geometry = Geometry.of(1, 1, 4, 2, 1, 1, 1, "circular", False)
    >>> block_kernel(torch.arange(16.0).view(1, 1, 4, 4), geometry).shape
    torch.Size([1, 4, 2, 2])
    """
    o, i, *taps = kernel.shape
    blocks = kernel.new_zeros(o, i, *geometry.stride, *geometry.kernel_shape[2:])
    axes = zip(taps, geometry.stride, geometry.dilation, geometry.kernel_shape[2:], strict=True)
    places = [_places(*axis, before) for axis, before in zip(axes, _before(taps, geometry), strict=True)]
    rooms, matrices = (t.movedim((0, 1), (-2, -1)) for t in (blocks, kernel))  # (*stride, *taps, o, i), (*k, o, i)
    for tap in product(*places):
        pairs = [axis[q] for axis, q in zip(places, tap, strict=True)]
        rooms[tuple(pixel for pixel, _ in pairs) + tuple(inner for _, inner in pairs)] = matrices[tap]
    return blocks.flatten(1, 1 + len(taps))


def _places(k: int, s: int, d: int, inner: int, before: int) -> dict[int, tuple[int, int]]:
    """Pixel of a block, and inner tap, that each of k taps reads; without those that no inner tap reads."""
    at = {d * t - d * (inner - 1) // 2: t for t in range(inner)}
    blocks = [divmod(d * q - before, s) for q in range(k)]
    return {q: (pixel, at[block]) for q, (block, pixel) in enumerate(blocks) if block in at}


def _before(taps: list[int], geometry: Geometry) -> list[int]:
    """Pixels that an output reads before its block: the padding, or what centres the kernel on the block."""
    if geometry.padding != "same":
        return list(geometry.padding)
    return [(d * (k - 1) - s + 1) // 2 for k, s, d in zip(taps, geometry.stride, geometry.dilation, strict=True)]


@torch.no_grad()
def _start(new: Any, layer: nn.Module) -> None:
    """Let the new layer start near the old one."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if not math.isfinite(norm := torch.linalg.vector_norm(weight).item()):
        raise ValueError(f"keep_weights needs finite weights; the weight of {layer} has norm {norm}")
    if not hasattr(new, "start_from"):
        raise ValueError(f"{type(new).__name__} cannot start from a plain layer (keep_weights=True)")
    if not isinstance(layer, nn.Linear):
        weight = weight.unsqueeze(-2) if isinstance(layer, nn.Conv1d) else weight  # an image of one row
        weight = block_kernel(weight, new.geometry)
    new.start_from(weight)
    if isinstance(layer.bias, Tensor) and new.bias is not None:
        new.bias.copy_(layer.bias)
