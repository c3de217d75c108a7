"""Convolutions of volumes: the spectral methods with a Fourier transform over three axes."""

__all__ = ["VolumeConv3d", "VolumeGeometry"]

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.convolutions import convolve
from orthoconv.nn.arguments import check_dtype, check_tensor, triple
from orthoconv.nn.geometry import Geometry, check_same_padding
from orthoconv.nn.plain import PlainSpectrum
from orthoconv.nn.spectral import UnscaledConv2d, Way
from orthoconv.planes import plane

Triple = tuple[int, int, int]
_AXES = (-3, -2, -1)


class VolumeGeometry(Geometry):
    """`Geometry` of volumes (d, h, w): kernel, stride, padding and dilation are triples, a size is one, too."""

    @classmethod
    def of(
        cls,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
        padding_mode: str,
        transposed: bool,
    ) -> "VolumeGeometry":
        one = Geometry.of(in_channels, out_channels, 1, 1, "same", 1, groups, padding_mode, transposed)
        k, s, d = (triple(*a) for a in (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation)))
        p = check_same_padding(padding, k, s, d)
        return cls(one.in_channels, one.out_channels, k, s, p, d, one.groups, padding_mode, transposed)  # type: ignore[arg-type]

    def size_of(self, shape: Sequence[int]) -> Any:
        return tuple(shape[-3:])

    def as_image(self, bias: Tensor) -> Tensor:
        return bias[:, None, None, None]

    @cached_property
    def kernel_shape(self) -> Any:
        """Shape (o, i / groups, kd, kh, kw) of the inner kernel."""
        taps = (max(1, k // s) for k, s in zip(self.kernel_size, self.stride, strict=True))
        return self.out_channels, self.in_channels * math.prod(self.stride) // self.groups, *taps

    def inner_size(self, size: int | Sequence[int]) -> Any:
        return self.torus(self.divide(triple("size", size), adjoint=False))

    def torus(self, size: Any) -> Any:
        if self.padding_mode == "circular":
            return size
        return tuple(n + d * (k - 1) for n, k, d in zip(size, self.taps, self.inner_dilation, strict=True))

    def divide(self, size: Sequence[int], *, adjoint: bool) -> Any:
        stride = (1, 1, 1) if adjoint else tuple(self.stride)
        if min(size) < 1 or any(n % s for n, s in zip(size, stride, strict=True)):
            raise ValueError(
                f"a convolution takes volumes whose sides are multiples of its stride {stride}, got {tuple(size)}"
            )
        return tuple(n // s for n, s in zip(size, stride, strict=True))

    def around(self, x: Tensor, convolve: Callable[[Tensor], Tensor], *, adjoint: bool) -> Tensor:
        x = x if adjoint else _blocks_to_channels(x, self.stride)
        size = self.size_of(x.shape)
        torus = self.torus(size)
        if size == torus:
            y = convolve(x)
        else:
            more = [at for n, m in zip(size[::-1], torus[::-1], strict=True) for at in (0, m - n)]
            y = convolve(F.pad(x, more))[..., : size[0], : size[1], : size[2]].contiguous()
        return _channels_to_blocks(y, self.stride) if adjoint else y

    def apply_blocks(self, x: Tensor, Q: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        apply = F.conv_transpose3d if adjoint else F.conv3d
        stride: Any = self.stride
        return apply(x, Q.unflatten(1, (-1, *stride)), bias, stride=stride, groups=self.groups)

    def apply_pixels(self, x: Tensor, Q: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv3d(x, Q[..., None, None, None], bias, groups=self.groups)


class VolumeConv3d(UnscaledConv2d):
    """Convolution of volumes with the arguments of `nn.Conv3d`, by a spectral method; abstract.

    Put it before the class of the method: ``class MyConv3d(VolumeConv3d, MyConv2d)``. The method makes one matrix for
    each frequency of the Fourier transform over three axes. What `CayleyConv2d` and `BROConv2d` do in space, to save
    time ("lifted"), is for images alone.

    Arguments:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Taps of the kernel, an int or three.
        stride: Int or three that divide the volume. Blocks of voxels become channels, and ``max(1, k // stride)`` taps
            mix them.
        padding: "same", or the ints with which nn.Conv3d divides each side by the stride.
        dilation: Distance of the taps, an int or three.
        groups: Number of blocks of channels, each convolved by itself.
        bias: Whether to add a learnable bias.
        padding_mode: "circular", or "zeros", as in `ImageLayer`.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, in_channels, d, h, w) or (in_channels, d, h, w), to (b, out_channels, d / stride, h / stride, w / stride).
        The output is contiguous.

    >>> from orthoconv.nn import LOTConv2d
    >>> class Volumes(VolumeConv3d, LOTConv2d): ...
    >>> Volumes(2, 2, 3)(torch.randn(1, 2, 4, 4, 4)).shape
    torch.Size([1, 2, 4, 4, 4])
    """

    geometry: Any
    replaces = nn.Conv3d
    geometry_type: ClassVar[type[Geometry]] = VolumeGeometry

    def possible_ways(self, size: Any, *, adjoint: bool, images: int) -> list[Way]:
        return [way for way in super().possible_ways(size, adjoint=adjoint, images=images) if way != "lifted"]

    def convolve_by_spectrum(self, x: Tensor, D: Tensor) -> Tensor:
        if not D.is_complex() or len(x) == 0:
            y: Tensor = self.geometry.apply_pixels(x, D[:, 0].real.flatten(0, 1), None)
            return y
        return convolve(plane(self.geometry.size_of(x.shape), x.dtype, x.device), x, D.transpose(0, 1))

    def singular_values(self, size: int | Sequence[int]) -> Tensor:
        """All singular values (d, h, w, r) of the layer for input volumes of that size, by frequency.

        They are those of the operator in the layer's own precision, found in float64.
        """
        if self.geometry.is_cropped:
            raise ValueError(f"singular values by frequency are those of a circular convolution, got {self}")
        whole: Any = triple("size", size)
        d, h, w = inner = self.geometry.inner_size(whole)
        values = torch.linalg.svdvals(self.spectrum(whole, double=True).detach()).transpose(0, 1).flatten(1)  # (f, r)
        half = values.sort(descending=True).values.expand(math.prod(inner) // w * (w // 2 + 1), -1)
        half = half.unflatten(0, (d, h, w // 2 + 1))
        conjugates = half[:, :, w - torch.arange(w // 2 + 1, w)]
        for axis, n in enumerate((d, h)):
            conjugates = conjugates.index_select(axis, -torch.arange(n, device=half.device) % n)
        return torch.cat((half, conjugates), dim=2)

    def spectral_units(self, size: Any, largest: float) -> float:
        """Return the figure of an image with d h rows, as which an exported layer transforms a volume."""
        d, h, w = size
        return super().spectral_units((d * h, w), largest)

    def exported_inner(self, size: Any) -> nn.Module:
        return _PlainVolume(self.spectrum(size), self.geometry.inner_size(size))

    def check_input(self, x: Tensor, channels: int, *, adjoint: bool) -> Tensor:
        name = type(self).__name__
        check_tensor(name, x)
        if x.ndim not in (4, 5) or x.shape[-4] != channels:
            raise ValueError(
                f"{name} takes volumes of shape (b, {channels}, d, h, w) or ({channels}, d, h, w), got {tuple(x.shape)}"
            )
        self.geometry.divide(x.shape[-3:], adjoint=adjoint)
        x = check_dtype(name, x, self.sources()[0].dtype)
        return x if x.ndim == 5 else x[None]

    def like_input(self, y: Tensor, x: Tensor) -> Tensor:
        return y if x.ndim == 5 else y[0]


class _PlainVolume(PlainSpectrum):
    """`PlainSpectrum` of volumes (b, c, d, h, w), which are images with d h rows to it."""

    def __init__(self, D: Tensor, size: Triple) -> None:
        super().__init__(D, size)
        self.rows = size[:2]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.flatten(2, 3)).unflatten(2, self.rows)
        return y


def _blocks_to_channels(x: Tensor, block: Sequence[int]) -> Tensor:
    """Permutation of (b, c, D d, H h, W w) to (b, c d h w, D, H, W) for blocks of d x h x w voxels; orthogonal."""
    if max(block) == 1:
        return x
    for axis, n in zip(_AXES, block, strict=True):
        x = x.unflatten(axis, (-1, n)).movedim(axis, 2)  # (b, c, n, ...), the last block first
    return x.movedim((2, 3, 4), (4, 3, 2)).flatten(1, 4)


def _channels_to_blocks(x: Tensor, block: Sequence[int]) -> Tensor:
    """Inverse and adjoint of `_blocks_to_channels`."""
    if max(block) == 1:
        return x
    x = x.unflatten(1, (-1, *block))  # (b, c, d, h, w, D, H, W)
    return x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)
