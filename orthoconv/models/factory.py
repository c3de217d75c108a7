"""The layers that a network is built from."""

__all__ = ["LayerFactory", "option_names", "width_of"]

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from orthoconv.nn import Scale
from orthoconv.nn.methods import conv_method, linear_method

Options = Mapping[str, Any]

_ELSEWHERE = ("device", "dtype")  # those of the whole network: `model.to`


class LayerFactory:
    """Makes the layers of a network, each followed by the factor that its share of the Lipschitz bound asks for.

    Arguments:
        conv: Name of the method of the convolutions.
        linear: Name of the method of the linear layers, or None for the one that goes with the convolutions.
        factor: Number that each layer is multiplied by.
        head: Name of the method of the last linear layer, or None for that of the others.
        identity: Whether layers with as many outputs as inputs start as the identity; with a stride, the inputs are
            those of a block of pixels.
        padding_mode: That of the convolutions, "circular" or "zeros".

    Attributes:
        identities: Number of layers made so far that were told to start as the identity.
    """

    def __init__(
        self,
        conv: str,
        linear: str | None,
        factor: float,
        head: str | None = None,
        *,
        identity: bool = False,
        padding_mode: str = "circular",
    ) -> None:
        self._name, self._conv, self._linear = conv, conv_method(conv), linear_method(linear, conv)
        self._linear_name = conv if linear is None else linear
        self._head = self._linear if head is None else linear_method(head, conv, "head")
        self._head_name = self._linear_name if head is None else head
        self.factor, self.identity, self.padding_mode, self.identities = factor, identity, padding_mode, 0

    def conv(
        self, i: int, o: int, k: int, stride: int = 1, method: str | None = None, options: Options | None = None
    ) -> list[nn.Module]:
        """Make a convolution from i to o channels, of the network's method or another; options are its own."""
        name, make = (self._name, self._conv) if method is None else (method, conv_method(method))
        padding = {} if self.padding_mode == "circular" else {"padding_mode": self.padding_mode}
        every = self._start(i * stride**2, o) | padding | dict(options or {})
        return self._layer(f"the convolutions of {name!r}", make, (i, o, k), {"stride": stride}, every)

    def linear(self, i: int, o: int, method: str | None = None, options: Options | None = None) -> list[nn.Module]:
        """Make a linear layer from i to o features, of the network's method or another; options are its own."""
        known = method is None
        name, make = (self._linear_name, self._linear) if known else (method, linear_method(method, self._name))
        every = self._start(i, o) | dict(options or {})
        return self._layer(f"the linear layers of {name!r}", make, (i, o), {}, every)

    def head(self, i: int, classes: int, method: str | None = None, options: Options | None = None) -> list[nn.Module]:
        """Make the last linear layer, from i features to logits, of the network's method or another."""
        known = method is None
        name, make = (self._head_name, self._head) if known else (method, linear_method(method, self._name))
        every = self._start(i, classes) | dict(options or {})
        return self._layer(f"the linear layers of {name!r}", make, (i, classes), {}, every)

    def scale(self, layers: int = 1) -> list[nn.Module]:
        """Make what gives a branch the factor of so many layers: nothing, if that is 1."""
        return [] if self.factor == 1 else [Scale(self.factor**layers)]

    def _start(self, inputs: int, outputs: int) -> dict[str, Any]:
        return {"identity": True} if self.identity and inputs == outputs else {}

    def _layer(
        self, kind: str, make: Callable[..., nn.Module], shape: tuple[int, ...], given: Options, options: Options
    ) -> list[nn.Module]:
        """Make a layer with options that it is known to take, and its factor."""
        _check_options(kind, make, len(shape), given, options)
        try:
            layer = make(*shape, **given, **options)
        except TypeError as error:
            if not options:
                raise
            raise ValueError(f"{_name(make)} cannot be made with {_text(options)}: {error}") from error
        self.identities += options.get("identity") is True
        return [layer, *self.scale()]


def option_names(make: Callable[..., nn.Module], positions: int) -> list[str] | None:
    """Return the names of the options of a layer, or None if it takes any.

    Arguments:
        make: Makes the layer.
        positions: Number of its first arguments, which the network gives.

    >>> option_names(nn.Linear, 2)
    ['bias']
    """
    parameters = _signature(make)
    if parameters is None:
        return None
    return [name for name in list(parameters)[positions:] if name not in _ELSEWHERE]


def _signature(make: Callable[..., nn.Module]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of what makes a layer, or None if it takes options of any name."""
    parameters = inspect.signature(make).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters


def _check_options(kind: str, make: Callable[..., nn.Module], positions: int, given: Options, options: Options) -> None:
    """Raise an error that lists the options of a layer, unless it takes these."""
    parameters, names = _signature(make), option_names(make, positions)
    for key, value in options.items():
        if names is None or parameters is None:
            continue
        if key not in names or key in given:
            takes = ", ".join(name for name in names if name not in given) or "none"
            raise ValueError(f"{key}={value!r} is no option of {kind}; those of {_name(make)} are {takes}")
        if isinstance(parameters[key].default, bool) and not isinstance(value, bool):
            raise ValueError(f"{key} of {_name(make)} must be true or false, got {value!r}")


def _name(make: Callable[..., nn.Module]) -> str:
    return str(getattr(getattr(make, "func", make), "__name__", repr(make)))


def _text(options: Options) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def width_of(channels: int, width: float) -> int:
    """Multiply `channels` by `width`; the product must be even, since MaxMin pairs channels."""
    if isinstance(width, bool) or not isinstance(width, int | float):
        raise ValueError(f"width must be a number, got {width!r}")
    product = channels * width
    if product < 2 or product % 2:
        if width == 1:
            raise ValueError(
                f"a layer must have an even number of channels or features, since MaxMin pairs them, got {channels}"
            )
        raise ValueError(f"width must make an even number of each {channels} channels, got {width} x {channels}")
    return int(product)
