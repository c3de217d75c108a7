"""The arguments, checks and geometry that every convolution here shares."""

__all__ = ["BaseConv2d", "Padding", "check_dtype", "ints", "pair", "positive_int"]

import math
from abc import abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import fourier
from orthoconv.nn.downsample import depth_to_space, space_to_depth
from orthoconv.nn.memory import Pair, Reparametrized
from orthoconv.tracing import full_precision

Padding = Literal["same"] | int | Sequence[int]


class BaseConv2d(Reparametrized):
    """Circular convolution with the arguments of `torch.nn.Conv2d`; abstract.

    A stride s moves each s x s block of pixels into the channels (Section 5.1, invertible downsampling), where a
    kernel of ``max(1, k // s)`` taps mixes them. What remains for a subclass is a convolution without stride by
    a kernel of shape `kernel_shape`; `transposed` ones are the adjoint of the convolution out -> in.
    """

    orthogonal: ClassVar[bool] = False
    transposed: ClassVar[bool] = False
    bias: nn.Parameter | None

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
    ) -> None:
        super().__init__()
        in_channels = positive_int("in_channels", in_channels)
        out_channels = positive_int("out_channels", out_channels)
        groups = positive_int("groups", groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"groups must divide the channels {in_channels} -> {out_channels}, got {groups}")
        if padding_mode not in ("circular", "zeros"):
            raise ValueError(f'padding_mode must be "circular" or "zeros", got {padding_mode!r}')
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = pair("kernel_size", kernel_size)
        self.stride = pair("stride", stride)
        self.dilation = pair("dilation", dilation)
        self.groups = groups
        self.padding_mode = padding_mode
        self.padding = self._check_padding(padding)
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, **self._factory))
        else:
            self.register_parameter("bias", None)

    def reset_bias(self) -> None:
        """PyTorch's initialisation of the bias of a convolution."""
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.kernel_shape[1:]))
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        """Shape (o, i / groups, kh, kw) of the kernel that acts after the downsampling."""
        i, o = self.in_channels, self.out_channels
        i, o = (o, i) if self.transposed else (i, o)
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        return o, i * sh * sw // self.groups, max(1, kh // sh), max(1, kw // sw)

    @property
    def _is_cropped(self) -> bool:
        """Whether something is lost at the border: with padding by zeros, unless there is one tap."""
        return self.padding_mode == "zeros" and self.kernel_shape[2:] != (1, 1)

    @abstractmethod
    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """Convolution of (b, c, h, w) by the operator, without stride; or its adjoint. Then the bias, if any."""

    @abstractmethod
    def one_tap(self, size: Pair) -> Tensor:
        """Matrix (o, i / groups) of a kernel of one tap, for images of that size after the downsampling."""

    @abstractmethod
    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        """Matrices (g, f, o, i) of the layer for input images of that size; in float64 if `double`.

        The operator is that of the layer's own precision all the same. With padding by zeros it is that on the larger
        torus, whose norm the layer does not exceed.
        """

    def singular_values(self, size: Pair) -> Tensor:
        """All singular values (h, w, r) of the layer for input images of that size, by frequency.

        They are those of the operator as it is, in the layer's precision, found in float64.
        """
        if self._is_cropped:
            raise ValueError(f"singular values by frequency are those of a circular convolution, got {self}")
        return fourier.spectral_singular_values(self.spectrum(size, double=True).detach(), self._inner_size(size))

    def forward(self, x: Tensor) -> Tensor:
        return self._map(x, self.bias, adjoint=self.transposed)

    def inverse(self, y: Tensor) -> Tensor:
        """The x for which an orthogonal layer returns `y`, exactly: the inverse of an isometry is its adjoint.

        With more outputs than inputs it is the left inverse, and `y` is projected on the range of the layer.
        """
        o, i = self.kernel_shape[0], self.kernel_shape[1] * self.groups
        i, o = (o, i) if self.transposed else (i, o)
        orthogonal = self.orthogonal and not self._is_cropped
        if i > o or not orthogonal:
            raise ValueError(
                f"{type(self).__name__} {self.in_channels} -> {self.out_channels} with stride {self.stride} has no "
                f"inverse: it {'maps' if orthogonal else 'is not orthogonal; it maps'} {i} channels to {o}"
            )
        block = self.stride if self.transposed else (1, 1)
        self._check_input(y, self.out_channels, block)
        return self._map(y if self.bias is None else y - self.bias[:, None, None], None, adjoint=not self.transposed)

    def _map(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """The layer that this one transposes, or is: downsample, convolve; or the adjoint. Then the bias."""
        block = (1, 1) if adjoint else self.stride
        batch = self._check_input(x, self.in_channels if adjoint == self.transposed else self.out_channels, block)
        with full_precision(batch):
            if self.kernel_shape[2:] == (1, 1):
                y = self._map_blocks(batch, bias, adjoint=adjoint)
            elif adjoint:
                inner = bias if bias is None else bias.repeat_interleave(math.prod(self.stride))
                y = depth_to_space(self._on_torus(batch, inner, adjoint=True), self.stride)
            else:
                y = self._on_torus(space_to_depth(batch, block), bias, adjoint=False)
        return y if x.ndim == 4 else y[0]

    def _on_torus(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """`convolve`; with padding by zeros on a torus that has room for the kernel, of which the image is a part."""
        h, w = x.shape[-2:]
        if self.padding_mode == "circular":
            return self.convolve(x, bias, adjoint=adjoint)
        H, W = self._torus((h, w))
        return self.convolve(F.pad(x, (0, W - w, 0, H - h)), bias, adjoint=adjoint)[..., :h, :w]

    def _map_blocks(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """`_map` for one tap: one matrix for each block of pixels, which nothing needs to move."""
        Q = self.one_tap(self._divide(x.shape[-2:], (1, 1) if adjoint else self.stride))
        apply = F.conv_transpose2d if adjoint else F.conv2d
        return apply(x, Q.unflatten(1, (-1, *self.stride)), bias, stride=self.stride, groups=self.groups)

    def _check_input(self, x: Tensor, channels: int, block: Pair) -> Tensor:
        """`x` as a batch in the layer's own precision, or an error that says what is wrong with it."""
        name = type(self).__name__
        if x.ndim not in (3, 4) or x.shape[-3] != channels:
            raise ValueError(
                f"{name} takes images of shape (b, {channels}, h, w) or ({channels}, h, w), got {tuple(x.shape)}"
            )
        self._divide(x.shape[-2:], block)
        x = check_dtype(name, x, self.sources()[0].dtype)
        return x if x.ndim == 4 else x[None]

    def _inner_size(self, size: int | Sequence[int]) -> Pair:
        return self._torus(self._divide(pair("size", size), (1, 1) if self.transposed else self.stride))

    def _torus(self, size: Pair) -> Pair:
        """Size of the torus that an image of that size, after the downsampling, is convolved on."""
        if self.padding_mode == "circular":
            return size
        (h, w), (kh, kw), (dh, dw) = size, self.kernel_shape[2:], self.dilation
        return h + dh * (kh - 1), w + dw * (kw - 1)

    def _divide(self, size: Sequence[int], block: Pair) -> Pair:
        (h, w), (sh, sw) = size, block
        if h < 1 or w < 1 or h % sh or w % sw:
            raise ValueError(
                f"{type(self).__name__} takes images whose height and width are multiples of its stride {block}, "
                f"got {(h, w)}"
            )
        return h // sh, w // sw

    def _check_padding(self, padding: Padding) -> Literal["same"] | Pair:
        """Accept "same", or the ints with which nn.Conv2d too divides each side by the stride, no more."""
        if isinstance(padding, str) and padding == "same":
            return "same"
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        accepted = [[p for p in range(d * k) if 0 <= d * (k - 1) - 2 * p < s] for k, s, d in axes]
        given = ints(padding)
        if given is not None and all(p in ps for p, ps in zip(given, accepted, strict=True)):
            return given
        also = f", or {accepted[0]} and {accepted[1]} for height and width" if all(accepted) else ""
        raise ValueError(
            f'padding must be "same"{also} with kernel_size={self.kernel_size}, stride={self.stride}, '
            f"dilation={self.dilation}; got {padding!r}"
        )

    def extra_repr(self) -> str:
        optional = {"stride": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "circular"}
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts += [f"{k}={getattr(self, k)}" for k, usual in optional.items() if getattr(self, k) != usual]
        return ", ".join(parts + ["bias=False"] * (self.bias is None))


def positive_int(name: str, value: object) -> int:
    """`value` as an int, if it is a positive one; or a ValueError that names the argument."""
    number = _int(value)
    if number is None or number < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return number


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the precision of the parameters, which autocast may have lowered; otherwise they must agree."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if x.dtype != dtype and not (autocast and x.is_floating_point()):
        raise TypeError(f"{name} with parameters of {dtype} takes inputs of that dtype, got {x.dtype}")
    return x.to(dtype)


def pair(name: str, value: int | Sequence[int]) -> Pair:
    """A positive int twice, or a pair of them; or a ValueError that names the argument."""
    both = ints(value)
    if both is None or min(both) < 1:
        raise ValueError(f"{name} must be a positive int or a pair of them, got {value!r}")
    return both


def ints(value: object) -> Pair | None:
    """An int twice, or a sequence of two; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [_int(v) for v in value]
        return (numbers[0], numbers[1]) if len(numbers) == 2 and None not in numbers else None  # type: ignore[return-value]
    number = _int(value)
    return None if number is None else (number, number)


def _int(value: object) -> int | None:
    """Ints of Python and NumPy; None for anything else, truth values and tensors included."""
    if isinstance(value, bool | Tensor):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
