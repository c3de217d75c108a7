"""A network by its name."""

__all__ = ["NETWORKS", "build"]

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from orthoconv.models import critic, kwlarge, resnet9, wide_resnet
from orthoconv.models.factory import LayerFactory
from orthoconv.nn import Normalize
from orthoconv.nn.arguments import pair, positive_int
from orthoconv.nn.weight_norm import WeightNormed


class Network(NamedTuple):
    """A network: what makes its layers, how many there are in a row, and what its image sides must divide by."""

    make: Callable[..., list[nn.Module]]
    depth: int
    divisor: int


NETWORKS = {
    "kwlarge": Network(kwlarge.kwlarge, kwlarge.DEPTH, kwlarge.DIVISOR),
    "resnet9": Network(resnet9.resnet9, resnet9.DEPTH, resnet9.DIVISOR),
    "wide_resnet10_10": Network(wide_resnet.wide_resnet10_10, wide_resnet.DEPTH, wide_resnet.DIVISOR),
    "critic": Network(critic.critic, critic.DEPTH, critic.DIVISOR),
}


def build(
    name: str,
    conv: str = "cayley",
    linear: str | None = None,
    width: float = 1,
    kernel_size: int = 3,
    lipschitz: float = 1.0,
    *,
    strided_kernel_size: int | None = None,
    learned_scale: bool = True,
    image_size: int | Sequence[int] = 32,
    in_channels: int = 3,
    classes: int = 10,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    head: str | None = None,
) -> nn.Sequential:
    """A network of the paper for images in [0, 1].

    Arguments:
        name: "kwlarge", "resnet9" or "wide_resnet10_10"; or "critic", that of the Wasserstein experiment.
        conv: Method of the convolutions, one of `orthoconv.nn.conv_methods()`.
        linear: Method of the linear layers, one of `orthoconv.nn.linear_methods()`; by default the one that goes with
            the convolutions.
        width: Factor of the numbers of channels.
        kernel_size: Taps of the convolutions.
        lipschitz: Bound L of the network; each of its m layers is multiplied by L ** (1 / m).
        strided_kernel_size: Taps of the two convolutions of KWLarge with stride 2, which halves them: 3 (the
            default, as `kernel_size`) in the released code, 4 in the network that the paper names.
        learned_scale: Whether the scale g of Cayley layers is trained (Section 4.1). If False, g keeps its first value.
        image_size: Height and width of the images, an int or a pair.
        in_channels: Channels of the images.
        classes: Number of logits.
        mean: Mean of each channel, subtracted first, if given.
        std: Standard deviation of each channel, divided by, if given; the bound becomes lipschitz / min(std).
        head: Method of the last linear layer, such as "normalized"; by default that of the other linear layers. With
            "normalized", L is the bound of each logit, and not of all together; `certify` knows.

    >>> build("kwlarge", in_channels=1, image_size=28)[0]
    CayleyConv2d(1, 32, kernel_size=(3, 3))
    """
    if not isinstance(name, str) or name not in NETWORKS:
        raise ValueError(f"name must be one of {', '.join(map(repr, NETWORKS))}, got {name!r}")
    network, size = NETWORKS[name], pair("image_size", image_size)
    for key, value in (("in_channels", in_channels), ("classes", classes), ("kernel_size", kernel_size)):
        positive_int(key, value)
    if any(n % network.divisor for n in size):
        raise ValueError(f"{name} takes images whose sides are multiples of {network.divisor}, got image_size={size}")
    if not isinstance(lipschitz, int | float) or not (math.isfinite(lipschitz) and lipschitz > 0):
        raise ValueError(f"lipschitz must be positive and finite, got {lipschitz!r}")
    if not isinstance(learned_scale, bool):
        raise ValueError(f"learned_scale must be True or False, got {learned_scale!r}")
    if std is not None and mean is None:
        raise ValueError(f"std={std!r} needs a mean beside it, got mean=None")
    make = LayerFactory(conv, linear, 1.0 if lipschitz == 1 else lipschitz ** (1 / network.depth), head)
    options: list[Any] = [make, size, in_channels, classes, width, kernel_size]
    if name == "kwlarge":
        options.append(kernel_size if strided_kernel_size is None else strided_kernel_size)
    elif strided_kernel_size is not None:
        raise ValueError(f"strided_kernel_size is for kwlarge, got {strided_kernel_size!r} with {name}")
    first = [] if mean is None else [_normalize(mean, std, in_channels)]
    try:
        model = nn.Sequential(*first, *network.make(*options))
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{name} with width={width} and kernel_size={kernel_size} cannot be made: {error}") from error
    for layer in model.modules():
        if isinstance(layer, WeightNormed):
            layer.g.requires_grad_(learned_scale)
    return model


def _normalize(mean: Sequence[float], std: Sequence[float] | None, channels: int) -> Normalize:
    if not isinstance(mean, Sequence) or len(mean) != channels:
        raise ValueError(f"mean needs one number for each of {channels} channels, got {mean!r}")
    return Normalize(mean, std)
