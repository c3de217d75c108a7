"""What every layer with the arguments of nn.Conv2d has, linear or not: its geometry, parameters, checks of inputs."""

__all__ = ["ImageLayer"]

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import Pair, check_dtype, check_tensor
from orthoconv.nn.geometry import Geometry, Padding
from orthoconv.nn.identity import identity_
from orthoconv.nn.origins import remade
from orthoconv.nn.reparametrized import Reparametrized
from orthoconv.tracing import is_concrete


def _of_geometry(name: str) -> Any:
    """Make a property that reads the layer's geometry."""
    return property(lambda layer: getattr(layer.geometry, name))


L = TypeVar("L", bound="ImageLayer")


class ImageLayer(Reparametrized):
    """Layer with the arguments of `torch.nn.Conv2d`, whose operator is computed from parameters; abstract.

    Everything around the operator is in its `geometry`. Options of a method are keyword arguments of `set_up`.

    Arguments:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Taps of the kernel, an int or a pair.
        stride: Int or pair that divides the image. Blocks of pixels become channels, and ``max(1, k // stride)``
            taps mix them.
        padding: "same", or the ints with which nn.Conv2d returns an image of the same size as this layer does.
        dilation: Distance of the taps, an int or a pair.
        groups: Number of blocks of channels, each convolved by itself.
        bias: Whether to add a learnable bias.
        padding_mode: "circular", or "zeros": the image is a part of a torus with room for the kernel, zero elsewhere,
            and the result is cropped. That never increases norms. With more than one tap, an orthogonal layer then
            loses norm at the border, and has no inverse. A method of several convolutions pads each of them.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride). As in torch, images
        in the memory format channels_last give images in that format, and others give contiguous ones; that of the
        weight does not matter.

    >>> from orthoconv.nn import CayleyConv2d, CPLConv2d
    >>> issubclass(CayleyConv2d, ImageLayer), issubclass(CPLConv2d, ImageLayer)
    (True, True)
    """

    replaces: ClassVar[type[nn.Module]] = nn.Conv2d
    transposed: ClassVar[bool] = False
    geometry_type: ClassVar[type[Geometry]] = Geometry
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_channels: int = _of_geometry("in_channels")
    out_channels: int = _of_geometry("out_channels")
    kernel_size: Pair = _of_geometry("kernel_size")
    stride: Pair = _of_geometry("stride")
    padding: Literal["same"] | Pair = _of_geometry("padding")
    dilation: Pair = _of_geometry("dilation")
    groups: int = _of_geometry("groups")
    padding_mode: str = _of_geometry("padding_mode")
    kernel_shape: tuple[int, int, int, int] = _of_geometry("kernel_shape")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "same",
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "circular",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.check_arguments(bias, dtype, options)
        self.geometry = self.geometry_type.of(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode, self.transposed
        )
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter("bias", self.new_parameter(self.out_channels) if bias else None)
        self.set_up(**options)
        self.reset_parameters()

    @classmethod
    def from_conv(cls: type[L], conv: nn.Module, *, keep_weights: bool = False, **options: Any) -> L:
        """Return the layer of this class that takes the place of a convolution of torch; see `orthogonal`.

        >>> from orthoconv.nn import LOTConv2d
        >>> LOTConv2d.from_conv(nn.Conv2d(3, 8, 3, padding=1), padding_mode="circular")
        LOTConv2d(3, 8, kernel_size=(3, 3))
        """
        if not isinstance(conv, cls.replaces):
            raise TypeError(f"{cls.__name__} takes the place of nn.{cls.replaces.__name__}, got {conv!r}")
        return remade(conv, cls, keep_weights=keep_weights, **options)  # type: ignore[return-value]

    def start_from(self, kernel: Tensor) -> None:
        """Start as near to the convolution by a plain kernel, of the shape `kernel_shape`, as the method comes.

        A method whose weight is such a kernel takes it as it is, and makes of it what it makes of any: `LOTConv2d` the
        nearest orthogonal convolution. `CayleyConv2d` comes near that one (`projection.near_cayley`), with signs of its
        own. Other methods refuse.
        """
        raise ValueError(
            f"{type(self).__name__} cannot start from a kernel (keep_weights=True); its parameters are "
            f"{', '.join(name for name, _ in self.named_parameters())}. Methods such as cayley, lot, rko can"
        )

    def set_up(self) -> None:
        """Make a kernel `weight` as nn.Conv2d has it; a method with other parameters makes its own."""
        self.weight = self.new_parameter(*self.kernel_shape)

    def reset_parameters(self) -> None:
        """Initialise as PyTorch does for a convolution, or as the identity."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.identity:
            identity_(self.weight, self.groups)
        self.reset_bias()

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def reset_bias(self) -> None:
        """Initialise the bias as PyTorch does for a convolution."""
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.kernel_shape[1:]))
            nn.init.uniform_(self.bias, -bound, bound)

    def check_input(self, x: Tensor, channels: int, *, adjoint: bool) -> Tensor:
        """Return `x` as a batch in the layer's own precision, or raise an error that says what is wrong with it."""
        name = type(self).__name__
        check_tensor(name, x)
        if x.ndim not in (3, 4) or x.shape[-3] != channels:
            raise ValueError(
                f"{name} takes images of shape (b, {channels}, h, w) or ({channels}, h, w), got {tuple(x.shape)}"
            )
        self.geometry.divide(x.shape[-2:], adjoint=adjoint)
        x = check_dtype(name, x, self.sources()[0].dtype)
        return x if x.ndim == 4 else x[None]

    def like_input(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the batch y in the memory format of the input x, and without its first axis if x has no batch."""
        if x.ndim != 4:
            return y[0]
        if not is_concrete(x):
            return y
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return y.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)

    def extra_repr(self) -> str:
        return f"{self.geometry}{', bias=False' * (self.bias is None)}"
