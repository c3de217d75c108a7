"""A network by its name."""

__all__ = ["NETWORKS", "build", "default_conv"]

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from orthoconv.models.critic import critic
from orthoconv.models.factory import LayerFactory
from orthoconv.models.kwlarge import kwlarge
from orthoconv.models.lipconvnet import lipconvnet
from orthoconv.models.liresnet import liresnet
from orthoconv.models.resnet9 import resnet9
from orthoconv.models.wide_resnet import wide_resnet10_10
from orthoconv.models.words import Word, count_layers, from_words
from orthoconv.nn import Ensemble, IsometryAverage, Normalize, conv_methods
from orthoconv.nn.arguments import pair, positive_int
from orthoconv.nn.weight_norm import WeightNormed

_CUSTOM = "custom"


class Network(NamedTuple):
    """A network by its name.

    Attributes:
        depth: Layers in a row on the way from image to logits, with the default options.
        divisor: What the sides of an image must divide by.
        words: Says its layers, given `width`, `kernel_size` and its own options.
        make: Makes its layers, if words cannot say them.
        options: Names of its own options.
        conv: Method of the convolutions if none is given; Cayley, if that one is not registered.
        by_method: Whether its words depend on the method of the convolutions: they are then given `conv`, too.
    """

    depth: int
    divisor: int
    words: Callable[..., list[str]] | None = None
    make: Callable[..., list[nn.Module]] | None = None
    options: tuple[str, ...] = ()
    conv: str = "cayley"
    by_method: bool = False


NETWORKS = {
    "kwlarge": Network(7, 4, words=kwlarge, options=("strided_kernel_size",)),
    "resnet9": Network(10, 16, make=resnet9),
    "wide_resnet10_10": Network(9, 16, make=wide_resnet10_10),
    "critic": Network(5, 16, words=critic),
    "lipconvnet": Network(6, 32, words=lipconvnet, options=("depth",)),
    "liresnet": Network(9, 8, words=liresnet, options=("depth",), conv="lires", by_method=True),
}
"""Networks that `build` knows by name, and what it needs to know of each.

>>> sorted(NETWORKS)
['critic', 'kwlarge', 'lipconvnet', 'liresnet', 'resnet9', 'wide_resnet10_10']
"""


def default_conv(name: str) -> str:
    """Name of the method of a network's convolutions if none is given.

    Arguments:
        name: One of `NETWORKS`, or "custom".

    >>> default_conv("kwlarge")
    'cayley'
    """
    conv = NETWORKS[name].conv if name in NETWORKS else "cayley"
    return conv if conv in conv_methods() else "cayley"


def build(
    name: str | Sequence[Word],
    conv: str | None = None,
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
    depth: int | None = None,
    layers: Sequence[Word] | None = None,
    members: int = 1,
    mirror: bool = False,
    identity: bool = False,
    padding_mode: str = "circular",
) -> nn.Sequential:
    """A network by its name, or by a list of words, for images in [0, 1].

    Arguments:
        name: "kwlarge", "resnet9" or "wide_resnet10_10" of the paper; "critic", that of the Wasserstein experiment;
            "lipconvnet" or "liresnet". Or a list that says each layer, such as
            ["conv 32 k3 s2", "maxmin", "flatten", "linear 64", "maxmin", "head"]; see docs/models.md.
        conv: Method of the convolutions, one of `orthoconv.nn.conv_methods()`; by default "cayley", and "lires" for
            liresnet.
        linear: Method of the linear layers, one of `orthoconv.nn.linear_methods()`; by default the one that goes with
            the convolutions.
        width: Factor of the numbers of channels.
        kernel_size: Taps of the convolutions.
        lipschitz: Bound L of the network, if its methods guarantee norms of at most 1: each of its m layers is
            multiplied by L ** (1 / m). A method that guarantees nothing, such as "lires" and "plain", is multiplied,
            too, but L is no bound then; `orthoconv.lipschitz_bound` finds one.
        strided_kernel_size: Taps of the two convolutions of KWLarge with stride 2, which halves them: 3 (the
            default, as `kernel_size`) in the released code, 4 in the network that the paper names.
        learned_scale: Whether the scale g of Cayley layers is trained (Section 4.1). If False, g keeps its first value.
        image_size: Height and width of the images, an int or a pair.
        in_channels: Channels of the images.
        classes: Number of logits.
        mean: Mean of each channel, subtracted first, if given.
        std: Standard deviation of each channel, divided by, if given, which divides the bound by min(std).
        head: Method of the last linear layer, such as "normalized"; by default that of the other linear layers. With
            "normalized", L is the bound of each logit, and not of all together; `certify` knows.
        depth: Convolutions of lipconvnet, a multiple of 5 (5 by default), or in the body of liresnet (4 by default).
        layers: The list of words, if `name` is "custom".
        members: Number of such networks, whose mean the model is: an `orthoconv.nn.Ensemble`.
        mirror: Whether the model is the mean over an image and its mirror image: an `orthoconv.nn.IsometryAverage`.
        identity: Whether each square layer starts as the identity, or as near to it as its method comes. A layer is
            square if it has as many outputs as inputs; with a stride, the inputs are those of a block of pixels. Other
            layers start as usual, since they would copy some channels and add up or drop others. It is an error if a
            square layer has no such option, or if no layer is square. If False, each method starts in its own way.
        padding_mode: That of the convolutions: "circular", or "zeros", with which most orthogonal layers lose norm at
            the border.

    >>> build("kwlarge", in_channels=1, image_size=28)[0]
    CayleyConv2d(1, 32, kernel_size=(3, 3))
    >>> build(["conv 4 s2", "maxmin", "flatten", "head"], image_size=8)[0]
    CayleyConv2d(3, 4, kernel_size=(3, 3), stride=(2, 2))
    """
    for key, value in (("mirror", mirror), ("identity", identity)):
        if type(value) is not bool:
            raise ValueError(f"{key} must be True or False, got {value!r}")
    model, *others = [
        _network(
            name, conv, linear, width, kernel_size, lipschitz, strided_kernel_size, learned_scale, image_size,
            in_channels, classes, mean, std, head, depth, layers, identity, padding_mode,
        )
        for _ in range(positive_int("members", members))
    ]  # fmt: skip
    if others:
        model = nn.Sequential(Ensemble([model, *others]))
    return nn.Sequential(IsometryAverage(model[0] if others else model)) if mirror else model


def _network(
    name: str | Sequence[Word], conv: str | None, linear: str | None, width: float, kernel_size: int, lipschitz: float,
    strided_kernel_size: int | None, learned_scale: bool, image_size: int | Sequence[int], in_channels: int,
    classes: int, mean: Sequence[float] | None, std: Sequence[float] | None, head: str | None, depth: int | None,
    layers: Sequence[Word] | None, identity: bool, padding_mode: str,
) -> nn.Sequential:  # fmt: skip
    """One network; `build` says what its arguments are."""
    own_options = {"strided_kernel_size": strided_kernel_size, "depth": depth}
    name, words = _words(name, layers, own_options, width, kernel_size, conv)
    size = pair("image_size", image_size)
    for key, value in (("in_channels", in_channels), ("classes", classes)):
        positive_int(key, value)
    divisor = NETWORKS[name].divisor if name in NETWORKS else 1
    if any(n % divisor for n in size):
        raise ValueError(f"{name} takes images whose sides are multiples of {divisor}, got image_size={size}")
    if not isinstance(lipschitz, int | float) or not (math.isfinite(lipschitz) and lipschitz > 0):
        raise ValueError(f"lipschitz must be positive and finite, got {lipschitz!r}")
    if not isinstance(learned_scale, bool):
        raise ValueError(f"learned_scale must be True or False, got {learned_scale!r}")
    if padding_mode not in ("circular", "zeros"):
        raise ValueError(f"padding_mode must be 'circular' or 'zeros', got {padding_mode!r}")
    if std is not None and mean is None:
        raise ValueError(f"std={std!r} needs a mean beside it, got mean=None")
    in_a_row = NETWORKS[name].depth if words is None else count_layers(words)
    factor = 1.0 if lipschitz == 1 else lipschitz ** (1 / in_a_row)
    method = default_conv(name) if conv is None else conv
    make = LayerFactory(method, linear, factor, head, identity=identity, padding_mode=padding_mode)
    first = [] if mean is None else [_normalize(mean, std, in_channels)]
    try:
        if words is None:
            made = NETWORKS[name].make(make, size, in_channels, classes, width, kernel_size)  # type: ignore[misc]
        else:
            own = width if name == _CUSTOM else 1  # the words of the others have their width in them
            made = from_words(words, make, (in_channels, *size), classes, width=own, kernel_size=kernel_size)
        model = nn.Sequential(*first, *made)
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(f"{name} with width={width} and kernel_size={kernel_size} cannot be made: {error}") from error
    if identity and not make.identities:
        raise ValueError(f"identity=True is for layers with as many outputs as inputs, and {name} has none")
    for layer in model.modules():
        if isinstance(layer, WeightNormed):
            layer.g.requires_grad_(learned_scale)
    return model


def _words(
    name: str | Sequence[Word],
    layers: Sequence[Word] | None,
    options: dict[str, int | None],
    width: float,
    kernel_size: int,
    conv: str | None,
) -> tuple[str, list[Word] | None]:
    """Return the name of the network, and its words, if it has any."""
    positive_int("kernel_size", kernel_size)
    if not isinstance(name, str) and isinstance(name, Sequence) and layers is None:
        name, layers = _CUSTOM, name
    given = {key: positive_int(key, value) for key, value in options.items() if value is not None}
    if name == _CUSTOM:
        if given:
            raise ValueError(f"a network given by its layers has no {min(given)}, got {given[min(given)]!r}")
        if isinstance(layers, str) or not isinstance(layers, Sequence):
            raise ValueError(f"layers must be a list, such as ['conv 8', 'maxmin', 'flatten', 'head'], got {layers!r}")
        return _CUSTOM, list(layers)
    if not isinstance(name, str) or name not in NETWORKS:
        known = ", ".join(map(repr, NETWORKS))
        raise ValueError(f"name must be one of {known}, or {_CUSTOM!r} with layers, got {name!r}")
    if layers is not None:
        raise ValueError(f"layers are for the name {_CUSTOM!r}, got {name!r}")
    network = NETWORKS[name]
    for key, value in given.items():
        if key not in network.options:
            takers = " and ".join(n for n, other in NETWORKS.items() if key in other.options)
            raise ValueError(f"{key} is for {takers}, got {value!r} with {name}")
    if network.words is None:
        return name, None
    method = {"conv": default_conv(name) if conv is None else conv} if network.by_method else {}
    return name, list(network.words(width, kernel_size, **given, **method))


def _normalize(mean: Sequence[float], std: Sequence[float] | None, channels: int) -> Normalize:
    if not isinstance(mean, Sequence) or len(mean) != channels:
        raise ValueError(f"mean needs one number for each of {channels} channels, got {mean!r}")
    return Normalize(mean, std)
