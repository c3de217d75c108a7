"""Blocks x - U* relu(U x + b): a step down the gradient of a convex potential, 1-Lipschitz while |U|^2 is at most 2."""

__all__ = ["Potential", "PotentialConv2d", "block_units", "fit_channels", "half_of", "lipschitz_constant"]

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import fourier
from orthoconv.linalg import frobenius_norm, spectral_norm
from orthoconv.nn.arguments import Pair, positive_int
from orthoconv.nn.downsample import space_to_depth
from orthoconv.nn.geometry import Geometry, UncroppedGeometry
from orthoconv.nn.image_layer import ImageLayer
from orthoconv.nn.kernel import add_channels, kernel_units, same_conv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.plain import PlainConv2d, PlainKernel, owned
from orthoconv.nn.reparametrized import Reparametrized
from orthoconv.tracing import full_precision

_CLOSED = -4.0  # of a gate at the start: the block takes sigmoid(-4) = 0.018 of its step


class Potential(Reparametrized):
    r"""Block that is not linear: `operator` returns U, as a kernel or a matrix; abstract.

    .. math:: x - U^* \max(U x + b, 0)

    Its Jacobian is I - U* S U with a diagonal S, whose entries are from 0 to 1. The eigenvalues of U* S U are between 0
    and |U|^2, so the Lipschitz constant is at most max(1, |U|^2 - 1). A method returns a U with |U|^2 <= 2.

    The block maps channels to themselves. With i inputs and o outputs it has max(i, o) channels: those that the input
    lacks are zero, and the first o are returned. Neither increases distances.
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"
    weight: nn.Parameter
    bias: nn.Parameter | None
    gate: nn.Parameter | None
    hidden: int

    def set_up(self, *, hidden: int | None = None, identity: bool = False) -> None:
        """Make the gate; a subclass makes `weight` with `hidden` rows, and `bias`."""
        self.register_parameter("gate", self.new_parameter() if identity else None)

    @abstractmethod
    def transform(self, size: Pair, *sources: Tensor) -> Tensor:
        """U with |U|^2 <= 2, from the sources without the gate."""

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        if self.gate is None:
            return self.transform(size, *sources)
        return self.transform(size, *sources[:-1]) * sources[-1].sigmoid().sqrt()

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.gate is None else (self.weight, self.gate)

    def reset_parameters(self) -> None:
        """Initialise the weight as Xavier and the bias as PyTorch does; close the gate, if there is one."""
        nn.init.xavier_normal_(self.weight)
        if self.gate is not None:
            nn.init.constant_(self.gate, _CLOSED)
        self.reset_bias()

    def reset_bias(self) -> None:
        """Initialise the bias as PyTorch does for a layer with this weight."""
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)

    def singular_values_for(self, shape: Sequence[int]) -> None:
        """Return None: the block is not linear."""

    def inverse(self, y: Tensor) -> Tensor:
        """Refuse: a block may map two inputs to one output."""
        raise ValueError(f"{type(self).__name__} has no inverse: it may map two inputs to one output")


class PotentialConv2d(Potential, ImageLayer):
    """`Potential` whose U is a convolution, with the arguments of nn.Conv2d; abstract.

    A stride moves each block of pixels into the channels first, so that i is in_channels * stride^2. Groups are blocks
    of their own. With ``padding_mode="zeros"``, both convolutions pad by zeros, as published: U is then a part of the
    convolution on a larger torus, whose norm it does not exceed.

    Arguments are those of `ImageLayer`, and

        hidden: Channels of U x, a multiple of groups. By default, each group has half the smaller number of its
            outputs and inputs, rounded up. With a stride, the inputs are those of a whole block of pixels.
        identity: Whether a learned gate multiplies the step, and starts almost closed: a square block then starts near
            the identity. A small weight would not do that, since its size is divided out.

    >>> from orthoconv.nn import SLLConv2d
    >>> layer = SLLConv2d(4, 4, 3)
    >>> isinstance(layer, PotentialConv2d), layer.guarantee
    (True, 'nonexpansive')
    """

    geometry_type: ClassVar[type[Geometry]] = UncroppedGeometry

    def set_up(self, *, hidden: int | None = None, identity: bool = False) -> None:
        o, i, kh, kw = self.kernel_shape
        c = max(i, o // self.groups)
        usual = self.groups * half_of(min(i, o // self.groups))
        self.hidden = positive_int("hidden", usual if hidden is None else hidden)
        if self.hidden % self.groups:
            raise ValueError(f"hidden must be a multiple of groups={self.groups}, got {hidden!r}")
        self.weight = self.new_parameter(self.hidden, c, kh, kw)
        super().set_up(identity=identity)
        if self.bias is not None:
            self.bias = self.new_parameter(self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch = self.check_input(x, self.in_channels, adjoint=False)
        with full_precision(batch):
            y = self.step(batch, self.bias)
        return self.like_input(y, x)

    def step(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the block to images (b, c, h, w) in their own precision."""
        if not self.geometry.has_one_tap:
            return self.geometry.around(x, partial(self._step, bias=bias), adjoint=False)
        g, o, i = self.groups, self.kernel_shape[0] // self.groups, self.kernel_shape[1]
        U = self.cached_operator(self.geometry.divide(x.shape[-2:], adjoint=False)).to(x.dtype)
        h = F.relu(self.geometry.apply_blocks(x, U[:, :i, 0, 0], bias, adjoint=False), inplace=True)
        needed = x[:, : -(-o // math.prod(self.stride))] if g == 1 else x
        y = same_conv2d(h, -U[:, :o], groups=g, adjoint=True)
        return add_channels(y, space_to_depth(needed, self.stride), g)

    def _step(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the block to images that are downsampled."""
        d, g, o, i = self.dilation, self.groups, self.kernel_shape[0] // self.groups, self.kernel_shape[1]
        zeros, size = self.geometry.is_cropped, self.geometry.torus((x.shape[-2], x.shape[-1]))
        U = self.cached_operator(size).to(x.dtype)
        h = F.relu(same_conv2d(x, U[:, :i], bias, d, g, zeros=zeros), inplace=True)
        return add_channels(same_conv2d(h, -U[:, :o], None, d, g, adjoint=True, zeros=zeros), x, g)

    def in_double(self) -> nn.Module:
        return _InDouble(self)

    def lipschitz(self, shape: Sequence[int]) -> float:
        size = self.geometry.inner_size(self.geometry.size_of(shape))
        U = self.cached_operator(size).detach().double()
        return lipschitz_constant(fourier.spectrum(U, size, dilation=self.dilation, groups=self.groups))

    def rounding_units(self, shape: Sequence[int]) -> float:
        return block_units(self.cached_operator(self.geometry.inner_size(self.geometry.size_of(shape))))

    def constants(self, shape: Sequence[int]) -> float:
        h, w = self.geometry.inner_size(self.geometry.size_of(shape))
        return 0.0 if self.bias is None else math.sqrt(h * w) * frobenius_norm(self.bias)

    def exported(self, shape: Sequence[int]) -> nn.Module:
        size = (shape[-2], shape[-1])
        U = self.cached_operator(self.geometry.inner_size(size))
        return PlainConv2d(self.geometry, size, _PlainStep(self.geometry, U, self.bias), None)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, hidden={self.hidden}"


def fit_channels(x: Tensor, o: int, groups: int = 1) -> Tensor:
    """Keep the first o channels of each group of (b, g i, h, w), or append channels of zeros.

    >>> fit_channels(torch.ones(1, 2, 1, 1), 3).flatten()
    tensor([1., 1., 0.])
    """
    i = x.shape[1] // groups
    if i == o:
        return x
    if groups == 1:
        return x[:, :o] if o < i else F.pad(x, (0, 0, 0, 0, 0, o - i))
    return torch.cat([fit_channels(part, o) for part in x.chunk(groups, 1)], 1)


def half_of(channels: int) -> int:
    """Rows of U for a block of so many channels: half of them, rounded up, which learns more in the same time.

    docs/decisions/0011-methods-of-the-field.md has the trials.

    >>> half_of(32), half_of(3)
    (16, 2)
    """
    return -(-channels // 2)


def lipschitz_constant(U: Tensor) -> float:
    """Bound of the Lipschitz constant, for matrices U (..., r, c)."""
    return max(1.0, spectral_norm(U) ** 2 * (1 + 2**-50) - 1)


def block_units(U: Tensor) -> float:
    """Rounding of both convolutions by a kernel U, in units, relative to the norms of the input and of the bias."""
    norm = math.sqrt(U[0, 0].numel()) * frobenius_norm(U)  # at least that of the convolution by the kernel |U|
    return 2 * kernel_units(U) * max(1.0, norm) + 2


class _InDouble(nn.Module):
    """A block in float64; it is not trained."""

    def __init__(self, layer: PotentialConv2d) -> None:
        super().__init__()
        self._layer = (layer,)  # not a submodule: it keeps its precision

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self._layer
        bias = None if layer.bias is None else layer.bias.detach().double()
        y = layer.step(x if x.ndim == 4 else x[None], bias)
        return y if x.ndim == 4 else y[0]


class _PlainStep(nn.Module):
    """The block on images that are downsampled, by fixed kernels."""

    bias: Tensor | None

    def __init__(self, geometry: Geometry, U: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.groups, self.out_channels = geometry.groups, geometry.kernel_shape[0] // geometry.groups
        adjoint = replace(geometry, transposed=True)
        self.first = PlainKernel(geometry, U[:, : geometry.kernel_shape[1]])
        self.second = PlainKernel(adjoint, U[:, : self.out_channels])
        self.register_buffer("bias", None if bias is None else owned(bias)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        h = self.second(torch.relu(h if self.bias is None else h + self.bias))
        return fit_channels(x, self.out_channels, self.groups) - h
