"""The registry of methods: what `models.build`, the command line, the benchmarks and the tests list."""

__all__ = [
    "Method",
    "conv_method",
    "conv_methods",
    "find_layer",
    "linear_method",
    "linear_methods",
    "register_method",
    "require_method",
]

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

Factory = Callable[..., nn.Module]
_KINDS = {
    "conv": "convolution",
    "transposed": "transposed convolution",
    "conv1d": "convolution of sequences",
    "conv3d": "convolution of volumes",
}


class Method(NamedTuple):
    """A way to make layers.

    Attributes:
        conv: Makes a convolution from (in_channels, out_channels, kernel_size, stride=...), or None.
        linear: Makes a linear layer from (in_features, out_features); or the name of the method whose linear layers
            networks put beside the convolutions; or None.
        transposed: Makes a transposed convolution, with the arguments of nn.ConvTranspose2d, or None.
        conv1d: Makes a convolution of sequences, with the arguments of nn.Conv1d, or None.
        conv3d: Makes a convolution of volumes, with the arguments of nn.Conv3d, or None.
    """

    conv: Factory | None
    linear: Factory | str | None
    transposed: Factory | None = None
    conv1d: Factory | None = None
    conv3d: Factory | None = None


_METHODS: dict[str, Method] = {}


def register_method(
    name: str,
    conv: Factory | None = None,
    linear: Factory | str | None = None,
    transposed: Factory | None = None,
    conv1d: Factory | None = None,
    conv3d: Factory | None = None,
) -> None:
    """Add a method, so that networks, the command line, benchmarks and tests know it by its name.

    A layer that is a `BaseConv2d` or `BaseLinear` brings everything else with it: certificates, rounding, verification,
    export.

    Arguments:
        name: Name of the method; one that is taken is an error.
        conv: Class or function that makes a convolution, with the arguments of nn.Conv2d.
        linear: Class or function that makes a linear layer, with the arguments of nn.Linear; or the name of a method
            whose linear layers go with the convolutions.
        transposed: Class or function that makes a transposed convolution, with the arguments of nn.ConvTranspose2d.
        conv1d: Class or function that makes a convolution of sequences, with the arguments of nn.Conv1d.
        conv3d: Class or function that makes a convolution of volumes, with the arguments of nn.Conv3d.

    >>> register_method("my_linear", linear=nn.Linear)
    >>> "my_linear" in linear_methods()
    True
    """
    if not isinstance(name, str) or not name or name in _METHODS:
        raise ValueError(f"name must be a new name; {', '.join(_METHODS)} are taken, got {name!r}")
    if conv is None and linear is None:
        raise ValueError(f"the method {name!r} needs conv=, linear= or both, got None")
    _METHODS[name] = Method(conv, linear, transposed, conv1d, conv3d)


def conv_methods() -> list[str]:
    """Names of the methods that have a convolution.

    >>> "cayley" in conv_methods()
    True
    """
    return sorted(name for name, method in _METHODS.items() if method.conv is not None)


def linear_methods() -> list[str]:
    """Names of the methods that have a linear layer of their own.

    >>> "cayley" in linear_methods()
    True
    """
    return sorted(name for name, method in _METHODS.items() if callable(method.linear))


def conv_method(name: str) -> Factory:
    """The convolution of a method, or a ValueError that lists the methods."""
    method = _METHODS.get(name) if isinstance(name, str) else None
    if method is None or method.conv is None:
        raise ValueError(f"conv must be one of {', '.join(map(repr, conv_methods()))}, got {name!r}")
    return method.conv


def require_method(name: str) -> None:
    """Raise a ValueError that lists the methods, unless there is one of that name."""
    if name not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, sorted(_METHODS)))}, got {name!r}")


def find_layer(name: str, kind: str) -> Factory:
    """What makes layers of a kind, a field of `Method`; or a ValueError that lists the methods that have them."""
    require_method(name)
    make: Factory | None = getattr(_METHODS[name], kind)
    if make is None:
        have = ", ".join(repr(k) for k, method in sorted(_METHODS.items()) if getattr(method, kind) is not None)
        raise ValueError(f"the method {name!r} has no {_KINDS[kind]}; {have} have one")
    return make


def linear_method(name: str | None, conv: str, argument: str = "linear") -> Factory:
    """The linear layer of a method; for None, the one that goes with the convolutions of the method `conv`.

    An error calls the name by that of the argument that it was given as.
    """
    method = _METHODS.get(name or conv) if isinstance(name, str | None) else None
    partner = None if method is None else method.linear
    if name is None and not callable(partner):
        return linear_method(partner or "plain", conv)
    if not callable(partner):
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, linear_methods()))}, got {name!r}")
    return partner
