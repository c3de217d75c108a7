"""The geometry of a convolution: what happens around the convolution itself, whatever its operator is."""

__all__ = ["Geometry", "NativeGeometry", "Padding", "UncroppedGeometry", "check_same_padding"]

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from orthoconv.nn.arguments import Pair, ints, pair, positive_int
from orthoconv.nn.downsample import depth_to_space, space_to_depth

Padding = Literal["same"] | int | Sequence[int]


@dataclass(frozen=True)
class Geometry:
    """Channels, kernel, stride, padding, dilation and groups of a convolution, or of its transpose.

    A stride s moves each s x s block of pixels into the channels (Section 5.1, invertible downsampling). There a kernel
    of ``max(1, k // s)`` taps mixes them, without stride: the *inner* convolution, with a kernel of `kernel_shape`, on
    images of the *inner* size. With padding by zeros, the inner image is a part of a larger torus. A transposed layer
    is the adjoint of the convolution out -> in.

    `Geometry.of` checks the arguments of a layer.
    """

    in_channels: int
    out_channels: int
    kernel_size: Pair
    stride: Pair
    padding: Literal["same"] | Pair
    dilation: Pair
    groups: int
    padding_mode: str
    transposed: bool
    crops: ClassVar[bool] = True  # whether `around` does what `on_torus` does

    @classmethod
    def of(
        cls,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: Padding,
        dilation: int | Sequence[int],
        groups: int,
        padding_mode: str,
        transposed: bool,
    ) -> "Geometry":
        """Check the arguments of `torch.nn.Conv2d`, and complete them."""
        i, o = positive_int("in_channels", in_channels), positive_int("out_channels", out_channels)
        groups = positive_int("groups", groups)
        if i % groups or o % groups:
            raise ValueError(f"groups must divide the channels {i} -> {o}, got {groups}")
        if padding_mode not in ("circular", "zeros"):
            raise ValueError(f'padding_mode must be "circular" or "zeros", got {padding_mode!r}')
        k, s, d = pair("kernel_size", kernel_size), pair("stride", stride), pair("dilation", dilation)
        return cls(i, o, k, s, check_same_padding(padding, k, s, d), d, groups, padding_mode, transposed)

    @cached_property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        """Shape (o, i / groups, kh, kw) of the inner kernel."""
        i, o = self.in_channels, self.out_channels
        i, o = (o, i) if self.transposed else (i, o)
        (kh, kw), (sh, sw) = self.kernel_size, self.stride
        return o, i * sh * sw // self.groups, max(1, kh // sh), max(1, kw // sw)

    def size_of(self, shape: Sequence[int]) -> Pair:
        """Size of the images in a tensor of that shape."""
        if len(shape) < 2:
            raise ValueError(f"images have a height and a width, got inputs of shape {tuple(shape)}")
        return shape[-2], shape[-1]

    def as_image(self, bias: Tensor) -> Tensor:
        """The bias (c,) as an image of one pixel."""
        return bias[:, None, None]

    @property
    def taps(self) -> Pair:
        """Height and width of the inner kernel."""
        return self.kernel_shape[2:]

    @property
    def inner_dilation(self) -> Pair:
        """Distance of the taps of the inner kernel."""
        return self.dilation

    @property
    def has_one_tap(self) -> bool:
        """Whether the inner kernel is one matrix, which acts on each block of pixels by itself."""
        return all(k == 1 for k in self.taps)

    @property
    def is_cropped(self) -> bool:
        """Whether something is lost at the border: with padding by zeros, unless there is one tap."""
        return self.padding_mode == "zeros" and not self.has_one_tap

    @property
    def channels(self) -> Pair:
        """Channels of the layer's input and output, those of a whole block counted: a matrix (second, first)."""
        i, o = self.kernel_shape[1] * self.groups, self.kernel_shape[0]
        return (o, i) if self.transposed else (i, o)

    def is_constant(self, size: Pair) -> bool:
        """Whether the inner convolution has the same real matrix at every frequency of a torus of that size."""
        return all(k == 1 or n == 1 for k, n in zip(self.taps, size, strict=True))

    def inner_size(self, size: int | Sequence[int]) -> Pair:
        """Size of the torus of the inner convolution, for input images of that size."""
        return self.torus(self.divide(pair("size", size), adjoint=self.transposed))

    def torus(self, size: Pair) -> Pair:
        """Size of the torus for an inner image of that size."""
        if self.padding_mode == "circular":
            return size
        (h, w), (kh, kw), (dh, dw) = size, self.taps, self.inner_dilation
        return h + dh * (kh - 1), w + dw * (kw - 1)

    def divide(self, size: Sequence[int], *, adjoint: bool) -> Pair:
        """Divide the size of an image by the stride; the adjoint takes images that are divided already."""
        (h, w), (sh, sw) = size, (1, 1) if adjoint else self.stride
        if h < 1 or w < 1 or h % sh or w % sw:
            raise ValueError(
                f"a convolution takes images whose sides are multiples of its stride {(sh, sw)}, got {(h, w)}"
            )
        return h // sh, w // sw

    def around(self, x: Tensor, convolve: Callable[[Tensor], Tensor], *, adjoint: bool) -> Tensor:
        """Downsample (b, c, h, w), pad to the torus, convolve and crop; or the adjoint, which upsamples at the end."""
        x = x if adjoint else space_to_depth(x, self.stride)
        y = self.on_torus(x, convolve) if self.crops else convolve(x)
        return depth_to_space(y, self.stride) if adjoint else y

    def on_torus(self, x: Tensor, convolve: Callable[[Tensor], Tensor]) -> Tensor:
        """Pad an inner image (b, c, h, w) by zeros to the torus, convolve it there, and crop the result."""
        h, w = x.shape[-2:]
        H, W = self.torus((h, w))
        return convolve(x) if (h, w) == (H, W) else convolve(F.pad(x, (0, W - w, 0, H - h)))[..., :h, :w].contiguous()

    def apply_blocks(self, x: Tensor, Q: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """`around` for one tap: multiply each block of pixels by the matrix Q (o, i / groups), then add the bias."""
        apply = F.conv_transpose2d if adjoint else F.conv2d
        return apply(x, Q.unflatten(1, (-1, *self.stride)), bias, stride=self.stride, groups=self.groups)

    def apply_pixels(self, x: Tensor, Q: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply each pixel by the matrix Q (o, i / groups), then add the bias."""
        return F.conv2d(x, Q[..., None, None], bias, groups=self.groups)

    def inner_bias(self, bias: Tensor | None, *, adjoint: bool) -> Tensor | None:
        """The bias as the inner convolution adds it: the adjoint adds it to every pixel of a block."""
        return bias.repeat_interleave(math.prod(self.stride)) if adjoint and bias is not None else bias

    def __str__(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        ones = (1,) * len(self.stride)
        usual = {"stride": ones, "dilation": ones, "groups": 1, "padding_mode": "circular"}
        return ", ".join(parts + [f"{k}={getattr(self, k)}" for k, v in usual.items() if getattr(self, k) != v])


class UncroppedGeometry(Geometry):
    """`Geometry` of an inner convolution that pads by zeros itself: it gets the image, and returns one of its size.

    A kernel in space does so. That is the same map as on the torus, in less time.
    """

    crops = False


@dataclass(frozen=True)
class NativeGeometry(UncroppedGeometry):
    """`Geometry` of a kernel that has `kernel_size` taps at any stride, as that of nn.Conv2d.

    Tap p of output n reads the pixel ``stride * n + dilation * p - before``. The inner kernel on blocks of pixels is
    that kernel with its gaps filled by zeros: `inner_kernel`. A stride that shares a divisor with the dilation leaves
    pixels unread, and so does one that exceeds the kernel; `of` refuses both.
    """

    def __post_init__(self) -> None:
        for k, s, d in zip(self.kernel_size, self.stride, self.dilation, strict=True):
            if k < s:
                raise ValueError(
                    f"kernel_size must be at least the stride, or pixels stay unread; "
                    f"got kernel_size={self.kernel_size} with stride={self.stride}"
                )
            if math.gcd(s, d) > 1:
                raise ValueError(
                    f"stride and dilation must have no common divisor, or pixels stay unread; "
                    f"got stride={self.stride} with dilation={self.dilation}"
                )

    @cached_property
    def before(self) -> Pair:
        """Rows and columns that an output reads before the first pixel of its block: an int `padding`, as given.

        With "same" the kernel is centred on the block, up to half a pixel: k = 3 with stride 2 reads 0 before, 1 after.
        """
        if self.padding != "same":
            return self.padding
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        rows, columns = ((d * (k - 1) - s + 1) // 2 for k, s, d in axes)
        return rows, columns

    @cached_property
    def reach(self) -> tuple[Pair, Pair]:
        """Rows and columns of blocks that an output reads before its own block, and after it."""
        axes = list(zip(self.kernel_size, self.stride, self.dilation, self.before, strict=True))
        top, left = (-(-b // s) for _, s, _, b in axes)
        bottom, right = (max(0, d * (k - 1) - b) // s for k, s, d, b in axes)
        return (top, left), (bottom, right)

    @cached_property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        o, i, *_ = super().kernel_shape
        axes = zip(self.kernel_size, self.stride, *self.reach, strict=True)
        kh, kw = (k if s == 1 else max(2 * first + 1, 2 * last) for k, s, first, last in axes)
        return o, i, kh, kw

    @property
    def inner_dilation(self) -> Pair:
        rows, columns = (d if s == 1 else 1 for d, s in zip(self.dilation, self.stride, strict=True))
        return rows, columns

    def inner_kernel(self, kernel: Tensor) -> Tensor:
        """Inner kernel (o, i sh sw, ...) of a kernel (o, i, kh, kw).

        >>> import torch
        >>> geometry = NativeGeometry.of(1, 1, 3, (1, 2), "same", 1, 1, "circular", False)
        >>> geometry.inner_kernel(torch.arange(3.0).expand(1, 1, 3, 3))[0, :, 0]
        tensor([[0., 2.],
                [1., 0.]])
        """
        for axis, s, d, t, b in zip((-2, -1), self.stride, self.dilation, self.taps, self.before, strict=True):
            if s > 1:
                kernel = kernel.movedim(axis, -1)
                if d > 1:
                    kernel = F.pad(kernel[..., None], (0, d - 1)).flatten(-2)[..., : 1 - d]
                start = s * ((t - 1) // 2) - b
                kernel = F.pad(kernel, (start, s * t - start - kernel.shape[-1])).movedim(-1, axis)
        return space_to_depth(kernel, self.stride)


def check_same_padding(padding: Padding, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """Accept "same", and the ints with which torch divides each side by the stride, no more and no less."""
    if isinstance(padding, str) and padding == "same":
        return "same"
    axes = zip(kernel, stride, dilation, strict=True)
    accepted = [[p for p in range(d * k) if 0 <= d * (k - 1) - 2 * p < s] for k, s, d in axes]
    given = ints(padding, len(accepted))
    if given is not None and all(p in ps for p, ps in zip(given, accepted, strict=True)):
        return given
    choices = [" or ".join(map(str, ps)) for ps in accepted]
    names = ("height", "width") if len(accepted) == 2 else ("depth", "height", "width")
    each = " and ".join(f"{choice} for the {name}" for choice, name in zip(choices, names, strict=False))
    also = f", or {choices[0] if len(set(choices)) == 1 else each}," if all(accepted) else ""
    raise ValueError(
        f'padding must be "same"{also} with kernel_size={kernel}, stride={stride}, dilation={dilation}; got {padding!r}'
    )
