"""The layers that a network is built from, by name."""

__all__ = ["CONVS", "LINEARS", "Kit", "width_of"]

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import nn

from orthoconv.nn import (
    BCOPConv2d,
    BjorckLinear,
    CayleyConv2d,
    CayleyLinear,
    CircularConv2d,
    OSSNConv2d,
    RKOConv2d,
    Scale,
    SVCMConv2d,
)

Factory = Callable[..., nn.Module]
T = TypeVar("T")

CONVS: dict[str, tuple[Factory, str]] = {  # and the linear layer that the paper pairs each with (Section 5.1)
    "cayley": (CayleyConv2d, "cayley"),
    "bcop": (BCOPConv2d, "bjorck"),
    "cayley_bcop": (partial(BCOPConv2d, orthogonalizer="cayley"), "cayley"),
    "rko": (RKOConv2d, "bjorck"),
    "crko": (partial(RKOConv2d, orthogonalizer="cayley"), "cayley"),
    "ossn": (OSSNConv2d, "bjorck"),
    "svcm": (SVCMConv2d, "bjorck"),
    "plain": (CircularConv2d, "plain"),
}
LINEARS: dict[str, Factory] = {"cayley": CayleyLinear, "bjorck": BjorckLinear, "plain": nn.Linear}


class Kit:
    """Makes the layers of a network, each followed by the factor that its share of the Lipschitz bound asks for.

    Arguments:
        conv: Name of the convolution.
        linear: Name of the linear layer, or None for the one that goes with the convolution.
        factor: Number that each layer is multiplied by.
    """

    def __init__(self, conv: str, linear: str | None, factor: float) -> None:
        self._conv, usual = _find("conv", conv, CONVS)
        self._linear = _find("linear", usual if linear is None else linear, LINEARS)
        self.factor = factor

    def conv(self, i: int, o: int, k: int, stride: int = 1) -> list[nn.Module]:
        """A convolution from i to o channels."""
        return [self._conv(i, o, k, stride=stride), *self.scale()]

    def linear(self, i: int, o: int) -> list[nn.Module]:
        """A linear layer from i to o features."""
        return [self._linear(i, o), *self.scale()]

    def scale(self, layers: int = 1) -> list[nn.Module]:
        """What a branch needs to have the factor of so many layers: nothing, if that is 1."""
        return [] if self.factor == 1 else [Scale(self.factor**layers)]


def width_of(channels: int, width: float) -> int:
    """`channels` times `width`, which must be an even number, as MaxMin pairs channels."""
    if isinstance(width, bool) or not isinstance(width, int | float):
        raise ValueError(f"width must be a number, got {width!r}")
    product = channels * width
    if product < 2 or product % 2:
        raise ValueError(f"width must make an even number of each {channels} channels, got {width} x {channels}")
    return int(product)


def _find(kind: str, name: str, table: dict[str, T]) -> T:
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"{kind} must be one of {', '.join(map(repr, table))}, got {name!r}")
    return table[name]
