"""Convolutions that are made orthogonal in the Fourier domain, whatever makes each matrix orthogonal."""

__all__ = ["SpectralConv2d"]

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv import fourier
from orthoconv.nn.base import BaseConv2d, Padding
from orthoconv.nn.memory import Pair
from orthoconv.nn.weight_norm import Signs, WeightNormed, weight_norm


class SpectralConv2d(BaseConv2d, WeightNormed):
    """Kernel -> spectrum -> `orthogonalize` -> apply (Algorithm 1); abstract.

    A method is a subclass that says how one matrix is made orthogonal, on (..., o, i). Attributes: `weight` (V),
    `g`, `bias`, and `signs`, a buffer or None.
    """

    orthogonal: ClassVar[bool] = True

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
        *,
        signs: Signs = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype,
        )  # fmt: skip
        self.weight = nn.Parameter(torch.empty(self.kernel_shape, **self._factory))
        self.add_scale(signs, self.groups * self.kernel_shape[1])

    @staticmethod
    @abstractmethod
    def orthogonalize(W: Tensor) -> Tensor:
        """Semi-orthogonal matrices of the same shape (..., o, i), for any W."""

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        V, g, *signs = sources
        W = fourier.spectrum(weight_norm(V, g), size, dilation=self.dilation, groups=self.groups)
        Q = self.orthogonalize(W)  # (g, f, o, i)
        return Q * signs[0].view(self.groups, 1, 1, -1) if signs else Q

    def convolve(self, x: Tensor, operator: Tensor, *, adjoint: bool) -> Tensor:
        return fourier.spectral_conv2d(x, operator.mH if adjoint else operator)

    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        Q = self.recall(self._inner_size(size))
        if double:
            return Q.to(torch.complex128 if Q.is_complex() else torch.float64)
        return Q.clone()  # what is remembered stays as it is, whatever is done to this
