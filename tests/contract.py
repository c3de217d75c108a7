"""What every convolution must satisfy, as data: shapes, and for each layer its factory, guarantee and oracle."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from oracles import (
    bcop_kernel,
    conv_matrix,
    downsample_matrix,
    grouped,
    padded_cayley,
    polar,
    power_method,
    strided_matrix,
)
from torch import Tensor, nn

from orthoconv.linalg import cayley
from orthoconv.nn import (
    AOCConv2d,
    AOCConvTranspose2d,
    AOLConv2d,
    AOLConvTranspose2d,
    BCOPConv2d,
    BCOPConvTranspose2d,
    BROConv2d,
    BROConvTranspose2d,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CircularConv2d,
    CPLConv2d,
    FrobeniusConv2d,
    LiResConv2d,
    LiResConvTranspose2d,
    LOTConv2d,
    LOTConvTranspose2d,
    OSSNConv2d,
    RKOConv2d,
    RKOConvTranspose2d,
    ShiftConv2d,
    ShiftConvTranspose2d,
    SLLConv2d,
    SOCConv2d,
    SOCConvTranspose2d,
    SVCMConv2d,
    TaylorSOCConv2d,
    TaylorSOCConvTranspose2d,
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


CORE = {0, 1, 2, 6, 14, 22, 23}  # cases that layers other than CayleyConv2d take in the quick suite
OF_VARIANTS = {1, 2, 22}  # those of layers that are transposed or have an option, and share most of another's code


def strides_and_dilates(case: Case) -> bool:
    return case.stride != (1, 1) and case.options.get("dilation", 1) != 1


def dilates_even_taps(case: Case) -> bool:
    k = case.k if isinstance(case.k, tuple) else (case.k, case.k)
    taps = [max(1, n // s) for n, s in zip(k, case.stride, strict=True)]
    return case.options.get("dilation", 1) != 1 and any(n % 2 == 0 for n in taps)


@dataclass(frozen=True)
class Contract:
    """A layer: how to build it, what it guarantees, and its dense matrix found by other means."""

    build: Callable[..., nn.Module]
    guarantee: Literal["orthogonal", "nonexpansive", "none"]
    oracle: Callable[[nn.Module, Any], Tensor]
    transposed: bool = False
    gradient_options: dict[str, Any] = field(default_factory=dict)  # with which derivatives are exact
    second_order: bool = True  # whether second derivatives are, too
    refuses: Callable[[Case], bool] = lambda case: False  # what a test of its own checks

    def layer(self, case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        i, o = (case.o, case.i) if self.transposed else (case.i, case.o)
        return self.build(i, o, case.k, **case.options, **options, dtype=dtype)

    def input_shape(self, case: Case) -> tuple[int, int, int]:
        return (case.o, *case.inner_size) if self.transposed else (case.i, *case.size)

    def takes(self, case: Case) -> bool:
        return not self.refuses(case)

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
    """Scale the channels by the sums of the whole matrix on an image so large that no two offsets meet."""
    q, (kh, kw) = 2**layer.steps, layer.kernel_shape[2:]
    size = 2 * q * (kh - 1) + 1, 2 * q * (kw - 1) + 1
    kernels = []
    for W in layer.weight.detach().chunk(layer.groups):
        wide = W.shape[0] < W.shape[1]
        C = conv_matrix(W, size).mT if wide else conv_matrix(W, size)
        rows = torch.eye(C.shape[1], dtype=C.dtype)[:: size[0] * size[1]]  # one pixel of each channel
        for _ in range(q):
            rows = rows @ C.mT @ C
        D = rows.abs().sum(1).pow(-0.5 / q)[:, None, None]
        kernels.append(W * (D[:, None] if wide else D))
    return kernel_matrix(layer, case, torch.cat(kernels))


def frobenius_matrix(layer: nn.Module, case: Case) -> Tensor:
    """Each group divided by the sum of squares, entry by entry, and by the number of its taps."""
    parts = layer.weight.detach().chunk(layer.groups)
    squares = [sum(float(w) ** 2 for w in W.flatten()) for W in parts]
    taps = layer.weight.shape[2] * layer.weight.shape[3]
    return kernel_matrix(layer, case, torch.cat([W / (taps * s) ** 0.5 for W, s in zip(parts, squares, strict=True)]))


def aoc_matrix(layer: nn.Module, case: Case) -> Tensor:
    """One tap of R after the other, each with its filters, at the stride: index by index."""
    (kh, kw), (sh, sw) = layer.kernel_size, layer.stride
    o, i = case.o // layer.groups, case.i // layer.groups
    flipped = (sh, sw) == (1, 1) and o > i
    blocks = []
    for g, weight in enumerate(layer.weight.detach()):
        R = polar(weight).unflatten(1, (-1, sh, sw))
        Ns = () if layer.projectors is None else [polar(N) for N in layer.projectors[g].detach()]
        kernel = R.new_zeros(len(R), R.shape[1], kh, kw)
        for a, b in itertools.product(range(sh), range(sw)):
            taps = kh - sh + 1, kw - sw + 1
            kernel[:, :, a : a + taps[0], b : b + taps[1]] += bcop_kernel(R[:, :, a, b], Ns, taps)
        kernel = kernel.transpose(0, 1)[:o] if flipped else kernel[:, :i]
        blocks.append(strided_matrix(kernel, case.size, layer.stride, layer.dilation))
    return torch.block_diag(*blocks)


def shift_matrix(layer: nn.Module, case: Case) -> Tensor:
    """M R^T S R for the whole image, S a permutation matrix made pixel by pixel, cut to the channels of the layer."""
    (h, w), (_, i, kh, kw) = case.inner_size, layer.kernel_shape
    eye, blocks = torch.eye(h * w, dtype=torch.float64), []
    for g, weight in enumerate(layer.weight.detach()):
        M = padded_cayley(weight).contiguous()
        if layer.mixer is None:
            blocks.append(torch.kron(M, eye))
            continue
        R = padded_cayley(layer.mixer[g].detach()).contiguous()
        c, centre = len(R), ((kh - 1) // 2, (kw - 1) // 2)
        away = [(p, centre[1]) for p in range(kh) if p != centre[0]] + [
            (centre[0], q) for q in range(kw) if q != centre[1]
        ]
        moved = -int(-layer.moved * c // 1)
        S = []
        for channel in range(c):
            p, q = away[channel * len(away) // moved] if channel < moved else centre
            tap = torch.zeros(1, 1, kh, kw, dtype=torch.float64)
            tap[0, 0, p, q] = 1
            S.append(conv_matrix(tap, (h, w), layer.dilation))
        A = torch.kron(M @ R.mT, eye) @ torch.block_diag(*S) @ torch.kron(R, eye)
        blocks.append(A[:, : i * h * w])
    return torch.block_diag(*blocks) @ downsample_matrix(case.i, case.size, case.stride)


def adjoint(matrix: Callable[[nn.Module, Case], Tensor]) -> Callable[[nn.Module, Case], Tensor]:
    return lambda layer, case: matrix(layer, case).mT


def lires_matrix(layer: nn.Module, case: Case) -> Tensor:
    """The free part, and ones where input and output have the same channel, at the tap nearest to the centre."""
    K = layer.gain.detach() / layer.depth**0.5 * layer.weight.detach()
    for group in K.chunk(layer.groups):
        for channel in range(min(group.shape[:2])):
            group[channel, channel, (K.shape[2] - 1) // 2, (K.shape[3] - 1) // 2] += 1
    return kernel_matrix(layer, case, K)


def block_matrix(layer: nn.Module, kernel: Tensor, size: tuple[int, int]) -> Tensor:
    """U of a block x - U* relu(U x + b), from the kernel of U."""
    return grouped(kernel, layer.groups, lambda W: conv_matrix(W, size, layer.dilation))


def cpl_matrix(layer: nn.Module, size: tuple[int, int]) -> Tensor:
    """Divide by a Schatten norm at the frequency where it is largest, by the FFT of the columns of the matrix."""
    p, kernels = 2 * 2**layer.squarings + 2, []
    for W in layer.weight.detach().chunk(layer.groups):
        columns = conv_matrix(W, size, layer.dilation)[:, :: size[0] * size[1]].view(len(W), *size, -1)
        values = torch.linalg.svdvals(torch.fft.fft2(columns, dim=(1, 2)).permute(1, 2, 0, 3))
        top = values.amax()
        kernels.append(W * 2**0.5 / (top * (values / top).pow(p).sum(-1).pow(1 / p).amax()))
    return block_matrix(layer, torch.cat(kernels), size)


def sll_matrix(layer: nn.Module, size: tuple[int, int]) -> Tensor:
    """Scale the rows by sums of the whole matrix on an image so large that no two offsets meet."""
    n, kernels = [2 * k - 1 for k in layer.kernel_shape[2:]], []
    for W, log_q in zip(*(p.detach().chunk(layer.groups) for p in (layer.weight, layer.log_q)), strict=True):
        C, q = conv_matrix(W, (n[0], n[1])), log_q.exp()
        sums = (C[:: n[0] * n[1]] @ C.mT).abs() @ q.repeat_interleave(n[0] * n[1]) / q
        kernels.append(W * (2 / sums).sqrt()[:, None, None, None])
    return block_matrix(layer, torch.cat(kernels), size)


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


def taylor_matrix(layer: nn.Module, case: Case) -> Tensor:
    """The first terms of the exponential of the whole skew matrix, divided by the layer's bound of its norm."""
    (o, i), n = layer.kernel_shape[:2], case.inner_size[0] * case.inner_size[1]
    blocks = []
    for W, K in zip(*(t.detach().chunk(layer.groups) for t in (layer.weight, layer.kernel)), strict=True):
        alone = conv_matrix(W, tuple(K.shape[2:]))  # on an image so large that no two taps meet
        s = (alone - alone.mT).norm() / 2 / conv_matrix(K, tuple(K.shape[2:])).norm()
        C = conv_matrix(W, case.inner_size, layer.dilation)
        powers = [torch.linalg.matrix_power((C - C.mT) / 2 / s, k) / math.factorial(k) for k in range(layer.terms + 1)]
        blocks.append(sum(powers)[: o // layer.groups * n, : i * n] / (1 + 1 / math.factorial(layer.terms + 1)))
    return torch.block_diag(*blocks) @ downsample_matrix(case.i, case.size, case.stride)


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
    "CayleyConvTranspose2d": Contract(CayleyConvTranspose2d, "orthogonal", adjoint(cayley_matrix), transposed=True),
    "AOCConv2d": Contract(AOCConv2d, "orthogonal", aoc_matrix, refuses=strides_and_dilates),
    "AOCConvTranspose2d": Contract(
        AOCConvTranspose2d, "orthogonal", adjoint(aoc_matrix), transposed=True, refuses=strides_and_dilates
    ),
    "ShiftConv2d": Contract(ShiftConv2d, "orthogonal", shift_matrix),
    "ShiftConv2d moved": Contract(_with(ShiftConv2d, moved=1.0), "orthogonal", shift_matrix),
    "ShiftConvTranspose2d": Contract(ShiftConvTranspose2d, "orthogonal", adjoint(shift_matrix), transposed=True),
    "AOLConvTranspose2d": Contract(
        _with(AOLConvTranspose2d, identity=False), "nonexpansive", adjoint(aol_matrix), transposed=True
    ),
    "BCOPConvTranspose2d": Contract(BCOPConvTranspose2d, "orthogonal", adjoint(bcop_matrix), transposed=True),
    "RKOConvTranspose2d": Contract(RKOConvTranspose2d, "nonexpansive", adjoint(rko_matrix), transposed=True),
    "AOLConv2d": Contract(_with(AOLConv2d, identity=False), "nonexpansive", aol_matrix),
    "AOLConv2d steps": Contract(_with(AOLConv2d, steps=1, identity=False), "nonexpansive", aol_matrix),
    "FrobeniusConv2d": Contract(FrobeniusConv2d, "nonexpansive", frobenius_matrix),
    "BCOPConv2d": Contract(BCOPConv2d, "orthogonal", bcop_matrix),
    "BCOPConv2d cayley": Contract(_with(BCOPConv2d, orthogonalizer="cayley"), "orthogonal", bcop_matrix),
    "RKOConv2d": Contract(RKOConv2d, "nonexpansive", rko_matrix),
    "RKOConv2d cayley": Contract(_with(RKOConv2d, orthogonalizer="cayley"), "nonexpansive", rko_matrix),
    "LOTConv2d": Contract(LOTConv2d, "orthogonal", lambda *args: spectral_matrix(*args, polar)),
    "BROConv2d": Contract(BROConv2d, "orthogonal", lambda *args: spectral_matrix(*args, reflection)),
    "SOCConv2d": Contract(SOCConv2d, "orthogonal", lambda *args: spectral_matrix(*args, skew_exponential)),
    "LOTConvTranspose2d": Contract(
        LOTConvTranspose2d, "orthogonal", lambda *args: spectral_matrix(*args, polar).mT, transposed=True
    ),
    "BROConvTranspose2d": Contract(
        BROConvTranspose2d, "orthogonal", lambda *a: spectral_matrix(*a, reflection).mT, transposed=True
    ),
    "SOCConvTranspose2d": Contract(
        SOCConvTranspose2d,
        "orthogonal",
        lambda *a: spectral_matrix(*a, skew_exponential).mT,
        transposed=True,
    ),
    "TaylorSOCConv2d": Contract(TaylorSOCConv2d, "nonexpansive", taylor_matrix, refuses=dilates_even_taps),
    "TaylorSOCConvTranspose2d": Contract(
        TaylorSOCConvTranspose2d, "nonexpansive", adjoint(taylor_matrix), transposed=True, refuses=dilates_even_taps
    ),
    "OSSNConv2d": Contract(OSSNConv2d, "none", ossn_matrix, gradient_options={"iterations": 100}, second_order=False),
    "SVCMConv2d": Contract(SVCMConv2d, "none", plain_matrix),
    "LiResConv2d": Contract(_with(LiResConv2d, depth=3), "none", lires_matrix),
    "LiResConvTranspose2d": Contract(
        _with(LiResConvTranspose2d, depth=3), "none", adjoint(lires_matrix), transposed=True
    ),
    "CircularConv2d": Contract(CircularConv2d, "none", plain_matrix),
}


def _with_all_rows(layer: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Blocks with as many rows as channels, so that small cases have several."""

    def make(*args: Any, **options: Any) -> nn.Module:
        block = layer(*args, **options)
        o, i = block.kernel_shape[:2]
        return block if "hidden" in options else layer(*args, **options, hidden=min(i * block.groups, o))

    return make


BLOCKS = {  # x - U* relu(U x + b), which are not linear; the oracle returns U for a size of the torus
    "CPLConv2d": Contract(_with_all_rows(CPLConv2d), "nonexpansive", cpl_matrix),
    "SLLConv2d": Contract(_with_all_rows(SLLConv2d), "nonexpansive", sll_matrix),
}
