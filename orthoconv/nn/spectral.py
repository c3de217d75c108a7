"""Convolutions that are made orthogonal in the Fourier domain, whatever makes each matrix orthogonal."""

__all__ = ["Signs", "SpectralConv2d", "check_signs", "weight_norm"]

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from orthoconv import fourier
from orthoconv.nn.base import BaseConv2d, Padding
from orthoconv.nn.memory import Pair

Signs = Literal["random"] | Sequence[int] | Tensor | None


class SpectralConv2d(BaseConv2d):
    """Kernel -> spectrum -> `orthogonalize` -> apply (Algorithm 1); abstract.

    A method is a subclass that says how one matrix is made orthogonal, on (..., o, i). Attributes: `weight` (V),
    `g`, `bias`, and `signs`, a buffer or None.
    """

    orthogonal: ClassVar[bool] = True
    signs: Tensor | None

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
        self.g = nn.Parameter(torch.empty((), **self._factory))
        self.register_buffer("signs", check_signs(signs, groups * self.kernel_shape[1], self.weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's initialisation of a convolution; g = |V|, so that the kernel starts as V."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.constant_(self.g, torch.linalg.vector_norm(self.weight.detach()))
        self.reset_bias()

    @property
    def kernel(self) -> Tensor:
        """The convolution before it is made orthogonal, g V / |V|."""
        return weight_norm(self.weight, self.g)

    @staticmethod
    @abstractmethod
    def orthogonalize(W: Tensor) -> Tensor:
        """Semi-orthogonal matrices of the same shape (..., o, i), for any W."""

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight, self.g) if self.signs is None else (self.weight, self.g, self.signs)

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


def weight_norm(V: Tensor, g: Tensor) -> Tensor:
    """g V / |V| (Section 4.1), zero where V is."""
    return torch.mul(V, g / torch.linalg.vector_norm(V).clamp_min(1e-12))


def check_signs(signs: Signs, n: int, like: Tensor) -> Tensor | None:
    """`signs` as a tensor of n entries that are 1 or -1, drawn at random if so asked; or None."""
    if signs is None:
        return None
    if isinstance(signs, str):
        if signs != "random":
            raise ValueError(f'signs must be None, "random" or {n} numbers that are 1 or -1, got {signs!r}')
        return (torch.randint(2, (n,), device=like.device) * 2 - 1).to(like)
    try:
        values = torch.as_tensor(signs)
    except (TypeError, ValueError, RuntimeError):
        values = torch.zeros(0)
    if values.shape != (n,) or not bool((values.abs() == 1).all()):
        raise ValueError(f'signs must be None, "random" or {n} numbers that are 1 or -1, got {signs!r}')
    return values.clone().to(like)
