"""Convolutions that are made orthogonal in the Fourier domain, whatever makes each matrix orthogonal."""

__all__ = ["SpectralConv2d"]

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import fourier
from orthoconv.nn.base import BaseConv2d, Padding
from orthoconv.nn.memory import Pair
from orthoconv.nn.weight_norm import Signs, WeightNormed, weight_norm
from orthoconv.planes import convolve, plane


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

    def transform(self, kernel: Tensor, size: Pair) -> Tensor:
        """Orthogonal matrices (f, g, o, i) from the kernel, on the plane of images of that size."""
        _, i, kh, kw = kernel.shape
        taps = kernel.permute(2, 3, 0, 1).reshape(kh * kw, self.groups, -1, i)
        rows, columns = (fourier.offsets(k, d) for k, d in zip((kh, kw), self.dilation, strict=True))
        return self.orthogonalize(plane(size, kernel.dtype, kernel.device).matrices(taps, rows, columns))

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        V, g, *signs = sources
        kernel = weight_norm(V, g)
        if self._is_constant(size):  # the same real matrix at every frequency
            Q = self.orthogonalize(kernel.sum((2, 3)).view(1, self.groups, -1, kernel.shape[1]))
        else:
            Q = self.transform(kernel, size)
        return Q * signs[0].view(self.groups, 1, -1) if signs else Q

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        size = x.shape[-2], x.shape[-1]
        D = self.recall(size)
        D = D.mH if adjoint else D
        if not D.is_complex() or len(x) == 0:  # the same matrix for every pixel, or no pixel at all
            return F.conv2d(x, D[0].real.flatten(0, 1)[..., None, None], bias, groups=self.groups)
        return convolve(plane(size, x.dtype, x.device), x, D, bias)

    def one_tap(self, size: Pair) -> Tensor:
        return self.recall(size)[0].flatten(0, 1)

    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        size = self._inner_size(size)
        Q = self.recall(size)
        if not self._is_constant(size):
            Q = plane(size, self.weight.dtype, self.weight.device).whole(Q)
        if double:
            Q = Q.to(torch.complex128 if Q.is_complex() else torch.float64)
        return Q.transpose(0, 1).clone()  # what is remembered stays as it is, whatever is done to this

    def _is_constant(self, size: Pair) -> bool:
        return all(k == 1 or n == 1 for k, n in zip(self.kernel_shape[2:], size, strict=True))
