"""Convolutions of sequences: those of images with one row."""

__all__ = ["SequenceConv1d"]

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import check_tensor, single
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.nn.geometry import Padding


class SequenceConv1d(BaseConv2d):
    """Convolution of sequences, with the arguments of `nn.Conv1d`: the one of images with a single row; abstract.

    Put it before the class of the convolution: ``class MyConv1d(SequenceConv1d, MyConv2d)``. Everything is computed by
    that class. Its attributes are those of the image of one row, such as a weight (o, i, 1, k) and kernel_size (1, k).

    Arguments:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Number of taps.
        stride: Int that divides the length. Blocks of entries become channels, and ``max(1, k // stride)`` taps mix
            them.
        padding: "same", or the int with which nn.Conv1d divides the length by the stride.
        dilation: Distance of the taps.
        groups: Number of blocks of channels, each convolved by itself.
        bias: Whether to add a learnable bias.
        padding_mode: "circular", or "zeros", as in `ImageLayer`.
        device: Device of the parameters.
        dtype: Precision of the parameters.

    Shape:
        (b, in_channels, n) or (in_channels, n), to (b, out_channels, n / stride).

    >>> from orthoconv.nn import AOLConv2d
    >>> class AOLConv1d(SequenceConv1d, AOLConv2d): ...
    >>> AOLConv1d(2, 4, 3)(torch.randn(1, 2, 8)).shape
    torch.Size([1, 4, 8])
    """

    replaces = nn.Conv1d

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
        k, s, d = single("kernel_size", kernel_size), single("stride", stride), single("dilation", dilation)
        rows: Padding = padding if isinstance(padding, str) else (0, single("padding", padding, least=0))
        try:
            super().__init__(
                in_channels, out_channels, (1, k), (1, s), rows, (1, d), groups, bias, padding_mode, device, dtype,
                **options,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} convolves images of one row, and {error}") from error

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._as_row(x, self.in_channels)).squeeze(-2)

    def inverse(self, y: Tensor) -> Tensor:
        return super().inverse(self._as_row(y, self.out_channels)).squeeze(-2)

    def _as_row(self, x: Tensor, channels: int) -> Tensor:
        check_tensor(type(self).__name__, x)
        if x.ndim not in (2, 3) or x.shape[-2] != channels:
            raise ValueError(
                f"{type(self).__name__} takes sequences of shape (b, {channels}, n) or ({channels}, n), "
                f"got {tuple(x.shape)}"
            )
        return x.unsqueeze(-2)

    def lipschitz(self, shape: Sequence[int]) -> float:
        return super().lipschitz(_of_row(shape))

    def rounding_units(self, shape: Sequence[int]) -> float:
        return super().rounding_units(_of_row(shape))

    def singular_values(self, size: int | Sequence[int]) -> Tensor:
        """All singular values (n, r) of the layer for sequences of that length, by frequency."""
        return super().singular_values((1, single("size", size)))[0]

    def singular_values_for(self, shape: Sequence[int]) -> Tensor | None:
        return None if self.geometry.is_cropped else self.singular_values(shape[-1])

    def in_double(self) -> nn.Module:
        return _OnRows(super().in_double())

    def exported(self, shape: Sequence[int]) -> nn.Module:
        return _OnRows(super().exported(_of_row(shape)))

    def extra_repr(self) -> str:
        return re.sub(r"\(1, (\d+)\)", r"(\1,)", super().extra_repr())


class _OnRows(nn.Module):
    """A module of images, applied to sequences as images of one row."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.unsqueeze(-2))
        return y.squeeze(-2)


def _of_row(shape: Sequence[int]) -> Sequence[int]:
    """Shape of an image of one row, from the shape (c, n) of a sequence."""
    return (*shape[:-1], 1, shape[-1])
