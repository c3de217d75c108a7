"""Activations made of reflections, whose Jacobian is orthogonal, and two pointwise ones that are 1-Lipschitz."""

__all__ = ["Abs", "HouseHolder", "LPReLU", "NActivation", "SoftHuber"]

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import axis, channel_axis, check_floating, number, positive_int
from orthoconv.nn.layer import Guarantee, Layer


class _Activation(Layer):
    """Nonlinear map whose Jacobian has norm at most 1 everywhere; abstract."""

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0


class Abs(_Activation):
    r"""Absolute value of the first :math:`\beta` of the channels; the other channels stay as they are.

    With :math:`\beta = 1/2` it is `MaxMin` between two rotations, at the price of one operation (LipNeXt, 2026).

    Arguments:
        fraction: Part :math:`\beta` of the channels, in [0, 1]; beta times their number is rounded down.
        dim: Axis of the channels, as in `GroupSort`; needed only for a fraction below 1.

    Shape:
        (b, c, ...), to the same.

    >>> Abs(0.5)(torch.tensor([[-1.0, 2.0, -3.0, 4.0]]))
    tensor([[ 1.,  2., -3.,  4.]])
    """

    def __init__(self, fraction: float = 1.0, dim: int | None = None) -> None:
        super().__init__()
        self.fraction = number("fraction", fraction, "in [0, 1]", lambda v: 0 <= v <= 1)
        self.dim = None if dim is None else axis("dim", dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.fraction == 1:
            return _fold(x)
        dim = channel_axis("Abs", x, self.dim)
        n = int(self.fraction * x.shape[dim])
        return torch.cat((_fold(x.narrow(dim, 0, n)), x.narrow(dim, n, x.shape[dim] - n)), dim)

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 0.0

    def extra_repr(self) -> str:
        return f"{self.fraction}"


def _fold(x: Tensor) -> Tensor:
    """Absolute value whose derivative at 0 is 1; that of torch.abs is 0, and would lose gradients of zero channels."""
    return torch.where(x < 0, -x, x)


class HouseHolder(_Activation):
    r"""Reflect pairs of channels onto one side of a learned line: :math:`v - 2 \max(0, n^T v) n` with |n| = 1.

    The pair is channel c and channel c + n / 2. Its line has the angle t / 2, so n = (sin t/2, -cos t/2). At the start
    t = pi / 2 for each pair, which sorts it in ascending order. Known as HH1 (Singla, Singla and Feizi, Improved
    deterministic l2 robustness on CIFAR-10 and CIFAR-100, 2022).

    Arguments:
        channels: Number of channels; even.
        dim: Axis of the channels, as in `GroupSort`.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, c, ...), to the same.

    >>> HouseHolder(4)(torch.tensor([[1.0, 4.0, 3.0, 2.0]])).round(decimals=4)
    tensor([[1., 2., 3., 4.]], grad_fn=<RoundBackward1>)
    """

    def __init__(
        self,
        channels: int,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_floating("HouseHolder", dtype)
        if positive_int("channels", channels) % 2:
            raise ValueError(f"channels must be even, got {channels!r}")
        self.dim = None if dim is None else axis("dim", dim)
        self.angle = nn.Parameter(torch.full((channels // 2,), math.pi / 2, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        dim = channel_axis("HouseHolder", x, self.dim)
        half = _along(self.angle / 2, x, dim, "HouseHolder", 2)
        (a, b), s, c = x.chunk(2, dim), half.sin(), half.cos()
        beyond = 2 * (a * s - b * c).relu()
        return torch.cat((a - beyond * s, b + beyond * c), dim)

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 40.0  # sine and cosine to 2 ulp move n by 6 units, which count four times; the rest are 9 roundings

    def extra_repr(self) -> str:
        return f"{2 * len(self.angle)}"


class NActivation(_Activation):
    r"""Continuous function with slopes 1, -1, 1 for each channel: :math:`x - 2\,\mathrm{clamp}(x, t_1, t_2)`.

    The learned corners are t1 <= t2; two numbers are learned, and the smaller is t1. With t1 = t2 the function is the
    identity up to a constant; with t2 = 0 and t1 below all inputs, the absolute value. Channels start with
    (-`reach`, 0) and (0, 0) in turn (Prach and Lampert, 1-Lipschitz neural networks are more expressive with
    N-activations, 2023, who train the corners with a hundredth of the learning rate).

    Arguments:
        channels: Number of channels.
        reach: Non-negative number; -reach is the first t1 of every other channel.
        dim: Axis of the channels, as in `GroupSort`.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, c, ...), to the same.

    >>> NActivation(2)(torch.tensor([[-0.5, -0.5], [-3.0, 3.0]]))
    tensor([[ 0.5000, -0.5000],
            [-1.0000,  3.0000]], grad_fn=<SubBackward0>)
    """

    def __init__(
        self,
        channels: int,
        reach: float = 1.0,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_floating("NActivation", dtype)
        reach = number("reach", reach, "at least 0 and finite", lambda v: 0 <= v < math.inf)
        self.dim = None if dim is None else axis("dim", dim)
        self.corners = nn.Parameter(torch.zeros(2, positive_int("channels", channels), device=device, dtype=dtype))
        nn.init.constant_(self.corners[0, ::2], -reach)

    def forward(self, x: Tensor) -> Tensor:
        dim = channel_axis("NActivation", x, self.dim)
        low, high = (_along(t, x, dim, "NActivation") for t in (self.corners.amin(0), self.corners.amax(0)))
        return x - 2 * x.clamp(low, high)

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 1.0  # |x - 2 t| is at most |x| if 0 is between the corners, and |x| + |f(0)| otherwise

    def extra_repr(self) -> str:
        return f"{self.corners.shape[1]}"


class LPReLU(_Activation):
    """PReLU whose learned slope is clipped to [-1, 1], so that it is 1-Lipschitz.

    Arguments:
        channels: Number of channels, each with a slope; 1 for one slope for all.
        slope: First slope, in [-1, 1].
        dim: Axis of the channels, as in `GroupSort`.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, c, ...), to the same.

    >>> LPReLU(slope=-0.5)(torch.tensor([[-2.0, 3.0]]))
    tensor([[1., 3.]], grad_fn=<WhereBackward0>)
    """

    def __init__(
        self,
        channels: int = 1,
        slope: float = 0.25,
        dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_floating("LPReLU", dtype)
        slope = number("slope", slope, "in [-1, 1]", lambda v: -1 <= v <= 1)
        self.dim = None if dim is None else axis("dim", dim)
        self.slope = nn.Parameter(torch.full((positive_int("channels", channels),), slope, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        slope = self.slope.clamp(-1, 1)
        if len(slope) > 1:
            slope = _along(slope, x, channel_axis("LPReLU", x, self.dim), "LPReLU")
        return torch.where(x < 0, slope * x, x)

    def lipschitz(self, shape: Sequence[int]) -> float:
        return math.nan if self.slope.isnan().any() else 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 1.0

    def extra_repr(self) -> str:
        return f"{len(self.slope)}"


class SoftHuber(_Activation):
    r"""Smooth absolute value :math:`\sqrt{x^2 + \delta^2} - \delta`, with slopes between -1 and 1.

    It is near |x| for inputs beyond :math:`\delta`, and near :math:`x^2 / 2 \delta` below.

    Arguments:
        delta: Positive number.

    Shape:
        Any, to the same.

    >>> SoftHuber(3.0)(torch.tensor([0.0, 4.0, -4.0]))
    tensor([0., 2., 2.])
    """

    def __init__(self, delta: float = 0.05) -> None:
        super().__init__()
        self.delta = number("delta", delta, "positive and finite", lambda v: 0 < v < math.inf)

    def forward(self, x: Tensor) -> Tensor:
        m = x.detach().abs().clamp_min(self.delta)  # no square overflows, as in hypot, which ONNX lacks
        root = m * ((x / m).square() + (self.delta / m).square()).sqrt()
        return x * (x / (self.delta + root))  # the difference of the roots would lose its digits near 0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 10.0

    def extra_repr(self) -> str:
        return f"{self.delta}"


def _along(values: Tensor, x: Tensor, dim: int, name: str, size: int = 1) -> Tensor:
    """Return a value for each channel, or for each `size` of them, in a shape that broadcasts over `x`."""
    if x.shape[dim] != size * len(values):
        raise ValueError(f"{name}({size * len(values)}) takes that number of channels, got shape {tuple(x.shape)}")
    return values.view(-1, *[1] * (x.ndim - dim - 1))
