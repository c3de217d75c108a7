"""What every convolution must satisfy, as data: shapes, and for each layer its factory, guarantee and oracle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from oracles import bcop_kernel, conv_matrix, downsample_matrix, grouped, padded_cayley, polar, power_method
from torch import Tensor, nn

from orthoconv.linalg import cayley
from orthoconv.nn import (
    AOLConv2d,
    BCOPConv2d,
    BROConv2d,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CircularConv2d,
    LOTConv2d,
    OSSNConv2d,
    RKOConv2d,
    SOCConv2d,
    SVCMConv2d,
)


@dataclass(frozen=True)
class Case:
    """Arguments of a convolution i -> o, and the size of the image before the stride."""

    i: int
    o: int
    k: int | tuple[int, int]
    size: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.i}->{self.o} k={self.k} {self.size[0]}x{self.size[1]} {options}".strip()

    @property
    def stride(self) -> tuple[int, int]:
        s = self.options.get("stride", 1)
        return (s, s) if isinstance(s, int) else s

    @property
    def inner_size(self) -> tuple[int, int]:
        return self.size[0] // self.stride[0], self.size[1] // self.stride[1]

    @property
    def inner_channels(self) -> tuple[int, int]:
        return self.i * self.stride[0] * self.stride[1], self.o


CASES = [
    Case(3, 3, 3, (4, 4)),
    Case(2, 5, 3, (4, 6)),
    Case(5, 2, 3, (6, 4)),
    Case(3, 3, 3, (5, 3)),
    Case(2, 3, 2, (4, 5)),
    Case(3, 3, 4, (5, 5)),
    Case(3, 2, 1, (3, 4)),
    Case(3, 3, 7, (4, 3)),
    Case(2, 2, (3, 1), (4, 5)),
    Case(1, 4, (2, 5), (3, 6)),
    Case(3, 3, 3, (1, 7)),
    Case(2, 4, 3, (6, 1)),
    Case(4, 4, 3, (1, 1)),
    Case(2, 2, 3, (2, 2)),
    Case(2, 8, 3, (4, 6), {"stride": 2}),
    Case(2, 3, 4, (6, 4), {"stride": 2}),
    Case(1, 9, 3, (6, 3), {"stride": 3}),
    Case(1, 4, 7, (6, 9), {"stride": 3}),
    Case(2, 4, 5, (4, 6), {"stride": (1, 2)}),
    Case(4, 4, 3, (4, 4), {"groups": 2}),
    Case(4, 6, 3, (3, 5), {"groups": 2}),
    Case(3, 3, 3, (5, 4), {"groups": 3}),
    Case(2, 8, 4, (4, 4), {"groups": 2, "stride": 2}),
    Case(3, 3, 3, (6, 5), {"dilation": 2}),
    Case(2, 3, 2, (5, 6), {"dilation": (2, 3)}),
    Case(2, 2, 4, (8, 6), {"dilation": 2, "stride": 2}),
    Case(2, 4, 3, (4, 5), {"bias": False}),
]


CORE = {0, 1, 2, 6, 9, 12, 14, 17, 19, 22, 23}  # indices of the cases that every layer takes in the quick suite


@dataclass(frozen=True)
class Contract:
    """A layer: how to build it, what it guarantees, and its dense matrix found by other means."""

    build: Callable[..., nn.Module]
    guarantee: Literal["orthogonal", "nonexpansive", "none"]
    oracle: Callable[[nn.Module, Case], Tensor]
    transposed: bool = False
    gradient_options: dict[str, Any] = field(default_factory=dict)  # with which derivatives are exact
    second_order: bool = True  # whether second derivatives are, too
    heavy: bool = False  # whether the quick suite takes only the cases of CORE

    def layer(self, case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        i, o = (case.o, case.i) if self.transposed else (case.i, case.o)
        return self.build(i, o, case.k, **case.options, **options, dtype=dtype)

    def input_shape(self, case: Case) -> tuple[int, int, int]:
        return (case.o, *case.inner_size) if self.transposed else (case.i, *case.size)

    def is_isometry(self, case: Case) -> bool:
        i, o = case.inner_channels
        return self.guarantee == "orthogonal" and (o <= i if self.transposed else i <= o)


def cayley_matrix(layer: nn.Module, case: Case) -> Tensor:
    """The Cayley transform of the whole convolution matrix, group by group."""
    Q = grouped(layer.kernel.detach(), layer.groups, lambda W: cayley(conv_matrix(W, case.inner_size, layer.dilation)))
    if layer.signs is not None:
        Q = Q * layer.signs.repeat_interleave(case.inner_size[0] * case.inner_size[1])
    return Q @ downsample_matrix(case.i, case.size, case.stride)


def kernel_matrix(layer: nn.Module, case: Case, kernel: Tensor) -> Tensor:
    """The matrix of a layer that convolves with that kernel."""
    C = grouped(kernel.detach(), layer.groups, lambda W: conv_matrix(W, case.inner_size, layer.dilation))
    return C @ downsample_matrix(case.i, case.size, case.stride)


def plain_matrix(layer: nn.Module, case: Case) -> Tensor:
    return kernel_matrix(layer, case, layer.weight)


def rko_matrix(layer: nn.Module, case: Case) -> Tensor:
    orthogonal = {"bjorck": polar, "cayley": padded_cayley}[layer.orthogonalizer]
    W = layer.weight.detach()
    rows = torch.cat([orthogonal(part.flatten(1)) for part in W.chunk(layer.groups)])
    return kernel_matrix(layer, case, rows.view(W.shape) / (W.shape[2] * W.shape[3]) ** 0.5)


def bcop_matrix(layer: nn.Module, case: Case) -> Tensor:
    orthogonal = {"bjorck": polar, "cayley": padded_cayley}[layer.orthogonalizer]
    kernels = []
    for k, weight in enumerate(layer.weight.detach()):
        projectors = () if layer.projectors is None else layer.projectors[k].detach()
        kernel = bcop_kernel(orthogonal(weight), [orthogonal(N) for N in projectors], layer.kernel_shape[2:])
        kernels.append(kernel if kernel.shape[1] == layer.kernel_shape[1] else kernel.transpose(0, 1))
    return kernel_matrix(layer, case, torch.cat(kernels))


def ossn_matrix(layer: nn.Module, case: Case) -> Tensor:
    W = layer.weight.detach()
    C = grouped(W, layer.groups, lambda part: conv_matrix(part, case.inner_size, layer.dilation))
    return kernel_matrix(layer, case, W / max(1.0, power_method(C, layer.iterations)))


def aol_matrix(layer: nn.Module, case: Case) -> Tensor:
    """Scale the columns by the sums of the whole matrix on an image so large that no two offsets meet."""
    q, (kh, kw) = 2**layer.steps, layer.kernel_shape[2:]
    size = 2 * q * (kh - 1) + 1, 2 * q * (kw - 1) + 1
    kernels = []
    for W in layer.weight.detach().chunk(layer.groups):
        C = conv_matrix(W, size)
        rows = torch.eye(C.shape[1], dtype=C.dtype)[:: size[0] * size[1]]  # one pixel of each channel
        for _ in range(q):
            rows = rows @ C.mT @ C
        kernels.append(W * rows.abs().sum(1).pow(-0.5 / q)[:, None, None])
    return kernel_matrix(layer, case, torch.cat(kernels))


def spectral_matrix(layer: nn.Module, case: Case, transform: Callable[[Tensor], Tensor]) -> Tensor:
    """The transform of the whole convolution matrix of each group, cut to the first channels."""
    (o, i), n = layer.kernel_shape[:2], case.inner_size[0] * case.inner_size[1]
    o //= layer.groups
    Q = grouped(
        layer.weight.detach(),
        layer.groups,
        lambda W: transform(conv_matrix(W, case.inner_size, layer.dilation))[: o * n, : i * n],
    )
    return Q @ downsample_matrix(case.i, case.size, case.stride)


def reflection(V: Tensor) -> Tensor:
    """Reflection at the orthogonal complement of the range of V, by its singular vectors."""
    U = torch.linalg.svd(V, full_matrices=False).U
    return torch.eye(len(V), dtype=V.dtype) - 2 * U @ U.mT


def skew_exponential(W: Tensor) -> Tensor:
    """Exponential of the skew part, by the eigenvalues of a Hermitian matrix."""
    values, U = torch.linalg.eigh(0.5j * (W - W.mT))
    return ((U * torch.exp(-1j * values)) @ U.mH).real


def _with(layer: Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    return lambda *args, **kwargs: layer(*args, **kwargs, **options)


LAYERS = {
    "CayleyConv2d": Contract(CayleyConv2d, "orthogonal", cayley_matrix),
    "CayleyConv2d signs": Contract(_with(CayleyConv2d, signs="random"), "orthogonal", cayley_matrix),
    "CayleyConvTranspose2d": Contract(
        CayleyConvTranspose2d, "orthogonal", lambda layer, case: cayley_matrix(layer, case).mT, transposed=True
    ),
    "AOLConv2d": Contract(AOLConv2d, "nonexpansive", aol_matrix),
    "AOLConv2d steps": Contract(_with(AOLConv2d, steps=1), "nonexpansive", aol_matrix, heavy=True),
    "BCOPConv2d": Contract(BCOPConv2d, "orthogonal", bcop_matrix),
    "BCOPConv2d cayley": Contract(_with(BCOPConv2d, orthogonalizer="cayley"), "orthogonal", bcop_matrix),
    "RKOConv2d": Contract(RKOConv2d, "nonexpansive", rko_matrix),
    "RKOConv2d cayley": Contract(_with(RKOConv2d, orthogonalizer="cayley"), "nonexpansive", rko_matrix),
    "LOTConv2d": Contract(LOTConv2d, "orthogonal", lambda *args: spectral_matrix(*args, polar), heavy=True),
    "BROConv2d": Contract(BROConv2d, "orthogonal", lambda *args: spectral_matrix(*args, reflection), heavy=True),
    "SOCConv2d": Contract(SOCConv2d, "orthogonal", lambda *args: spectral_matrix(*args, skew_exponential), heavy=True),
    "OSSNConv2d": Contract(OSSNConv2d, "none", ossn_matrix, gradient_options={"iterations": 100}, second_order=False),
    "SVCMConv2d": Contract(SVCMConv2d, "none", plain_matrix),
    "CircularConv2d": Contract(CircularConv2d, "none", plain_matrix),
}
