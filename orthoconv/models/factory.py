"""The layers that a network is built from."""

__all__ = ["LayerFactory", "width_of"]

from torch import nn

from orthoconv.nn import Scale
from orthoconv.nn.methods import conv_method, linear_method


class LayerFactory:
    """Makes the layers of a network, each followed by the factor that its share of the Lipschitz bound asks for.

    Arguments:
        conv: Name of the method of the convolutions.
        linear: Name of the method of the linear layers, or None for the one that goes with the convolutions.
        factor: Number that each layer is multiplied by.
        head: Name of the method of the last linear layer, or None for that of the others.
    """

    def __init__(self, conv: str, linear: str | None, factor: float, head: str | None = None) -> None:
        self._name, self._conv, self._linear = conv, conv_method(conv), linear_method(linear, conv)
        self._head = self._linear if head is None else linear_method(head, conv, "head")
        self.factor = factor

    def conv(self, i: int, o: int, k: int, stride: int = 1, method: str | None = None) -> list[nn.Module]:
        """Make a convolution from i to o channels, of the network's method or another."""
        make = self._conv if method is None else conv_method(method)
        return [make(i, o, k, stride=stride), *self.scale()]

    def linear(self, i: int, o: int, method: str | None = None) -> list[nn.Module]:
        """Make a linear layer from i to o features, of the network's method or another."""
        make = self._linear if method is None else linear_method(method, self._name)
        return [make(i, o), *self.scale()]

    def head(self, i: int, classes: int, method: str | None = None) -> list[nn.Module]:
        """Make the last linear layer, from i features to logits, of the network's method or another."""
        make = self._head if method is None else linear_method(method, self._name)
        return [make(i, classes), *self.scale()]

    def scale(self, layers: int = 1) -> list[nn.Module]:
        """Make what gives a branch the factor of so many layers: nothing, if that is 1."""
        return [] if self.factor == 1 else [Scale(self.factor**layers)]


def width_of(channels: int, width: float) -> int:
    """Multiply `channels` by `width`; the product must be even, since MaxMin pairs channels."""
    if isinstance(width, bool) or not isinstance(width, int | float):
        raise ValueError(f"width must be a number, got {width!r}")
    product = channels * width
    if product < 2 or product % 2:
        raise ValueError(f"width must make an even number of each {channels} channels, got {width} x {channels}")
    return int(product)
