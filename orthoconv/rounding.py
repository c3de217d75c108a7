"""What floating point does to the logits: the same operators in float64, and a bound of the error of a forward pass.

A layer is the exact linear map of its operator as it is, entries of float32 included: that is what `lipschitz_bound`
speaks of. A forward pass computes something near it. How near is measured against `in_double`, whose own error is
bounded here, layer by layer, for sums in any order (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3).
"""

__all__ = ["Growth", "growth", "in_double", "rounding_bound"]

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from orthoconv import fourier
from orthoconv.lipschitz import batch_norm_gains, rule_of, zeros
from orthoconv.nn import (
    CayleyConv2d,
    ConvexResidual,
    GroupSort,
    InvertibleDownsample,
    MaxMin,
    Normalize,
    Scale,
    ScaledAvgPool2d,
)
from orthoconv.nn.base import BaseConv2d, pair
from orthoconv.nn.downsample import depth_to_space, space_to_depth
from orthoconv.nn.kernel import KernelConv2d
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.memory import Pair, frozen
from orthoconv.planes import MatrixPlane, plane
from orthoconv.tracing import replace_modules

_SAFETY = 1.01  # n u / (1 - n u) is less than this times n u, for sums of up to 100,000 terms in float32
_CPU = torch.device("cpu")
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # half the distance of 1 to the next number


@dataclass(frozen=True)
class Growth:
    """What is known of a computed function g and of the exact one f that it stands for, in the l2 norm.

    |f(x) - f(y)| <= gain |x - y|, |f(0)| <= offset, and |g(x) - f(x)| <= relative |x| + absolute. The rules of
    `lipschitz_bound`, which multiply and add, work on it as they do on the gain alone: a product is one function after
    another, a number times it a multiple.
    """

    unit: float
    gain: float
    offset: float
    relative: float
    absolute: float

    @overload
    def error(self, norm: Tensor) -> Tensor: ...
    @overload
    def error(self, norm: float) -> float: ...
    def error(self, norm: Tensor | float) -> Tensor | float:
        """Bound of |g(x) - f(x)| for x of that norm."""
        return self.relative * norm + self.absolute

    def __mul__(self, after: "Growth") -> "Growth":
        carry = after.gain + after.relative
        return Growth(
            self.unit,
            after.gain * self.gain,
            after.gain * self.offset + after.offset,
            carry * self.relative + after.relative * self.gain,
            carry * self.absolute + after.relative * self.offset + after.absolute,
        )

    def __rmul__(self, factor: float) -> "Growth":
        multiple = self._each(lambda part: abs(factor) * part)
        return multiple if factor == 1 else multiple._rounded(8)  # the factor may have been computed, too

    def __add__(self, other: "Growth") -> "Growth":
        parts = zip(self._parts(), other._parts(), strict=True)
        return Growth(self.unit, *(a + b for a, b in parts))._rounded(1)

    def __radd__(self, zero: float) -> "Growth":
        if zero != 0:  # what `sum` starts with
            raise TypeError(f"{zero!r} cannot be added to a Growth")
        return self

    def beside(self, *others: "Growth") -> "Growth":
        """That of functions whose values are put side by side."""
        return Growth(self.unit, *map(math.hypot, *(g._parts() for g in (self, *others))))

    def _parts(self) -> tuple[float, float, float, float]:
        return self.gain, self.offset, self.relative, self.absolute

    def _each(self, f: Callable[[float], float]) -> "Growth":
        return Growth(self.unit, *map(f, self._parts()))

    def _rounded(self, times: int) -> "Growth":
        e = 2 * times * self.unit
        relative, absolute = self.relative * (1 + e) + e * self.gain, self.absolute * (1 + e) + e * self.offset
        return Growth(self.unit, self.gain, self.offset, relative, absolute)


def rounding_bound(
    model: nn.Module, input_shape: Sequence[int], norm: float, dtype: torch.dtype = torch.float32
) -> float:
    """Bound of the l2 error of the logits that rounding makes, for inputs of at most that norm.

    It holds for whatever order sums are taken in, and for what `export` makes of the model, too; so it is far more than
    what is seen. See `certify` for a bound that is not.

    Arguments:
        model: Made of layers that have a rule, as for `lipschitz_bound`, in eval mode.
        input_shape: Shape of one input, without the batch.
        norm: Largest norm of an input.
        dtype: Precision that the model computes in: torch.float32, or torch.float64 for `in_double`.

    >>> rounding_bound(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8), norm=8.0) < 1e-3
    True
    """
    if not (math.isfinite(norm) and norm >= 0):
        raise ValueError(f"norm must be at least 0 and finite, got {norm!r}")
    return growth(model, input_shape, dtype).error(norm)


def growth(model: nn.Module, input_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Growth:
    """How errors grow through the model, of which the gain is its `lipschitz_bound`."""
    if dtype not in UNIT:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    x = zeros(model, input_shape)
    with torch.no_grad(), frozen(model):
        return _grow(model, x, type(model).__name__, dtype)


def _grow(module: nn.Module, x: Tensor, path: str, dtype: torch.dtype) -> Growth:
    def child(name: str, inner: nn.Module, y: Tensor) -> Growth:
        return _grow(inner, y, f"{path}.{name}", dtype)

    found: Growth | float = rule_of(module, path)(module, x, child)  # type: ignore[arg-type]
    if isinstance(found, Growth) and isinstance(module, nn.Sequential | ConvexResidual | fx.GraphModule):
        return found  # it is made of others, in the way that its rule says
    units = None if isinstance(found, Growth) else _units(module, x)
    if units is None:
        raise TypeError(
            f"rounding_bound has no rule for {type(module).__name__}, at {path}; "
            f"certify(..., rounding=False) does without"
        )
    unit, offset = UNIT[dtype], _SAFETY * _frobenius(module(x))
    constants = _constants(module, x) if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) else offset
    relative = _SAFETY * unit * units
    assert isinstance(found, float)
    return Growth(unit, found, offset, relative, (relative + 8 * unit) * constants)


def _units(module: nn.Module, x: Tensor) -> float | None:
    """|computed - exact| / |x| of a layer, in units of rounding and to first order; None if there is no rule."""
    units: float | None = None
    match module:
        case BaseConv2d():
            units = _units_of_convolution(module, (x.shape[-2], x.shape[-1]))
        case BaseLinear():
            units = (module.in_features + 1) * _frobenius(module.recall())
        case nn.Linear():
            units = (module.in_features + 1) * _frobenius(module.weight)
        case nn.Conv2d():
            units = _units_in_space(module.weight)
        case ScaledAvgPool2d() | nn.AvgPool2d():
            k = math.prod(pair("kernel_size", module.kernel_size))
            units = float((k + 3) * k)  # a pixel stands in at most k windows
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            units = 8 * float(batch_norm_gains(module).max())
        case Normalize():
            units = 4 / float(module.std.min())
        case Scale():
            units = 2 * abs(module.factor)
        case nn.LeakyReLU():
            units = 2 * max(1.0, abs(module.negative_slope))
        case nn.Tanh() | nn.Softsign() | nn.LogSigmoid() | nn.Sigmoid():
            units = 16.0  # of the value, which is at most |x| and the value at zero
        case _ if isinstance(module, _EXACT):
            units = 0.0
    return units


_EXACT = (
    GroupSort, InvertibleDownsample, MaxMin, nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle,
    nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.MaxPool2d, nn.Dropout, nn.Dropout2d,
    nn.Sequential,  # an empty one: others are made of their layers
)  # fmt: skip


def _units_of_convolution(layer: BaseConv2d, size: Pair) -> float:
    size = layer._inner_size(size)
    channels, taps = max(layer.kernel_shape[:2]), math.prod(layer.kernel_shape[2:])
    if taps == 1:
        return (channels + 1) * _frobenius(layer.one_tap(size))
    if isinstance(layer, KernelConv2d):
        largest = math.sqrt(taps) * _frobenius(layer.recall(size))
    else:
        largest = float(torch.linalg.matrix_norm(layer.recall(size)).max())
    units = 2 * _units_of_transform(size) * max(1.0, largest) + (2 * channels + taps + 4) * math.sqrt(2) * largest
    if isinstance(layer, KernelConv2d):  # in space in its own precision, by its spectrum in float64
        return max(units, _units_in_space(layer.recall(size)))
    if isinstance(layer, CayleyConv2d) and layer._lifts(size):  # most of the outputs are convolved in space
        spread = 1 + math.sqrt(taps) * (math.sqrt(channels) + abs(layer.g.item()))
        units = spread * (units + 2 * (taps * channels + 8))
    return units


def _units_in_space(kernel: Tensor) -> float:
    taps = kernel[0, 0].numel()
    return (taps * (max(kernel.shape[:2]) + 1) + 2) * math.sqrt(taps) * _frobenius(kernel)


def _units_of_transform(size: Pair) -> float:
    """Of a Fourier transform, relative to the norm: a fast one, or by a matrix for each axis or for both."""
    fast = 8 * sum(math.pow(p, 1.5) for side in size for p in _prime_factors(side))
    axes = sum(2 * (side + 2) * math.sqrt(2 * side) for side in size)  # as in `export`
    n = math.prod(size)
    both = (n + 2) * math.sqrt(2 * n) if isinstance(plane(size, torch.float32, _CPU), MatrixPlane) else 0.0
    return max(fast, axes, both)


def _prime_factors(n: int) -> list[int]:
    p = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [] if n == 1 else [p, *_prime_factors(n // p)]


def _constants(norm: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> float:
    """Norm of what batch normalisation adds: mean and bias, which may cancel."""
    assert norm.running_mean is not None
    moved = _frobenius(batch_norm_gains(norm) * norm.running_mean.double())
    return (moved + (0.0 if norm.bias is None else _frobenius(norm.bias))) * math.sqrt(x[0, 0].numel())


def _frobenius(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach().double()))


class _Exact(nn.Module):
    """A layer of this library as the linear map of its operator, computed in float64; not trained on."""

    def __init__(self, layer: BaseConv2d | BaseLinear) -> None:
        super().__init__()
        self._layer = (layer,)  # not a part: it keeps its precision
        self._known: dict[Pair, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._layer
        bias = None if layer.bias is None else layer.bias.detach().double()
        if isinstance(layer, BaseLinear):
            return F.linear(x, self._operator((1, 1)), bias)
        images = x if x.ndim == 4 else x[None]
        D = self._operator((x.shape[-2], x.shape[-1]))
        images = images if layer.transposed else space_to_depth(images, layer.stride)
        h, w = images.shape[-2:]
        H, W = layer._torus((h, w))
        y = fourier.spectral_conv2d(F.pad(images, (0, W - w, 0, H - h)), D.mH if layer.transposed else D)[..., :h, :w]
        y = depth_to_space(y, layer.stride) if layer.transposed else y
        y = y if bias is None else y + bias[:, None, None]
        return y if x.ndim == 4 else y[0]

    def _operator(self, size: Pair) -> Tensor:
        (layer,) = self._layer
        if size not in self._known:
            Q = layer.recall().double() if isinstance(layer, BaseLinear) else layer.spectrum(size, double=True)
            self._known[size] = Q.detach()
        return self._known[size]


def in_double(model: nn.Module) -> nn.Module:
    """A copy of `model` in eval mode that computes in float64, with the operators of the model's own precision.

    It is the function that `lipschitz_bound` speaks of, to some 1e-13: not what ``model.double()`` is, whose operators
    would be made again, in float64.

    >>> from orthoconv.nn import CayleyLinear
    >>> model, x = CayleyLinear(8, 4).eval(), torch.rand(2, 8)
    >>> torch.dist(in_double(model)(x.double()), model(x)).item() < 1e-6
    True
    """
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for module in list(model.modules()):
        _keep_parametrized(module)
    if isinstance(model, BaseConv2d | BaseLinear):
        return _Exact(model)
    replace_modules(model, {m: _Exact(m) for m in model.modules() if isinstance(m, BaseConv2d | BaseLinear)})
    return model.double()


def _keep_parametrized(module: nn.Module) -> None:
    """Make what torch computes from parameters a parameter, as it was computed.

    Not by torch.nn.utils.parametrize.remove_parametrizations, which changes the class that a copy shares with its
    original.
    """
    if not parametrize.is_parametrized(module):
        return
    found = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, value in found.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
