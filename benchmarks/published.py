"""Training steps of our layers against the published formulas of the same methods: `python benchmarks/published.py`.

Each class is a method as its paper or its public code computes it, differentiated by torch: the references for speed,
used nowhere else. They are for square layers on square images. The steps take turns; a ratio is the median of those of
single turns. The reference of AOC is orthogonium's layer, if that package is installed.

Kernels in space are timed twice: padded circularly, as is usual here, and by zeros, as in the public code of SOC, CPL,
SLL and LiRes. Both sides pad alike. `--out FILE` keeps the times.
"""

import argparse
import json
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from tables import ratio
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.allocator import keep_freed_memory
from orthoconv.lab.benchmark import orthogonium_conv
from orthoconv.lab.machine import code_digest, hardware
from orthoconv.nn.methods import conv_method


class Spectral(nn.Conv2d):
    """FFT of images and kernel, one matrix for each frequency, inverse FFT."""

    def __init__(self, channels: int, inner: int | None = None) -> None:
        super().__init__(inner or channels, channels, 3)

    @abstractmethod
    def matrix(self, W: Tensor) -> Tensor:
        """Orthogonal matrices (h, w, o, i) from those of the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        W = torch.fft.rfft2(self.weight, (n, n)).permute(2, 3, 0, 1)  # (h, w, o, i)
        X = torch.fft.rfft2(x).permute(2, 3, 1, 0)
        return torch.fft.irfft2((self.matrix(W) @ X).permute(3, 2, 0, 1), s=(n, n)) + self.bias[:, None, None]


class LOT(Spectral):
    """(W W*)^(-1/2) W by ten coupled Newton steps (Xu et al., 2022)."""

    def matrix(self, W: Tensor) -> Tensor:
        eye = torch.eye(W.shape[-1], dtype=W.dtype)
        S = W @ W.mH + 1e-4 * eye
        norm = torch.linalg.matrix_norm(S, keepdim=True)
        Y, Z = S / norm, eye.expand_as(S)
        for _ in range(10):
            T = 0.5 * (3 * eye - Z @ Y)
            Y, Z = Y @ T, T @ Z
        return Z @ W / norm.sqrt()


class BRO(Spectral):
    """I - 2 V (V* V)^-1 V* of rank c / 4, multiplied out (Lai et al., 2025)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels // 4)

    def matrix(self, W: Tensor) -> Tensor:
        eye = torch.eye(W.shape[-2], dtype=W.dtype)
        return eye - 2 * W @ torch.linalg.inv(W.mH @ W) @ W.mH


class Kernel(nn.Conv2d):
    """Convolution in space."""

    def __init__(self, channels: int, padding_mode: str) -> None:
        super().__init__(channels, channels, 3, padding=1, padding_mode=padding_mode)
        self.register_buffer("u", torch.randn(1, channels, 16, 16))

    def convolve(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve with the layer's padding."""
        return self._conv_forward(x, kernel, bias)

    def adjoint(self, y: Tensor) -> Tensor:
        """Apply the adjoint of the convolution by the weight."""
        if self.padding_mode == "zeros":
            return F.conv_transpose2d(y, self.weight, padding=1)
        return self.convolve(y, self.weight.transpose(0, 1).flip(2, 3))


class SOC(Kernel):
    """Five terms of the exponential of a skew kernel, scaled by power iterations on four matrices (Singla et al.)."""

    def forward(self, x: Tensor) -> Tensor:
        K = self.weight - self.weight.transpose(0, 1).flip(2, 3)
        o = len(K)
        shapes = (K.reshape(o, -1), K.permute(0, 2, 1, 3).reshape(3 * o, -1), K.permute(0, 3, 1, 2).reshape(3 * o, -1))
        norms = []
        for M in (*shapes, K.permute(0, 2, 3, 1).reshape(9 * o, -1)):
            v = F.normalize(M.detach().mT @ M.detach().sum(1), dim=0)
            norms.append((M @ v).norm())
        K = 0.7 * K / (3 * torch.stack(norms).amin())
        y = term = x
        for k in range(1, 6):
            term = self.convolve(term, K) / k
            y = y + term
        return y + self.bias[:, None, None]


class AOL(Kernel):
    """Columns divided by the sums of the kernel's correlation with itself (Prach and Lampert, 2022)."""

    def forward(self, x: Tensor) -> Tensor:
        W = self.weight.transpose(0, 1)
        D = F.conv2d(W, W, padding=2).abs().sum((1, 2, 3)).rsqrt()
        return self.convolve(x, self.weight * D[:, None, None], self.bias)


class CPL(Kernel):
    """x - 2 / |W|^2 W^T relu(W x + b), |W| by one power iteration (Meunier et al., 2022): a lower bound."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.convolve(self.u, self.weight).flatten(), dim=0).view_as(self.u)
            self.u = F.normalize(self.adjoint(v).flatten(), dim=0).view_as(self.u)
        norm = self.convolve(self.u, self.weight).norm()
        y = F.relu(self.convolve(x, self.weight, self.bias))
        return x - 2 / norm**2 * self.adjoint(y)


class SLL(Kernel):
    """x - 2 W^T T relu(W x + b), T by the kernel's correlation with itself (Araujo et al., 2023)."""

    def __init__(self, channels: int, padding_mode: str) -> None:
        super().__init__(channels, padding_mode)
        self.q = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        sums = F.conv2d(self.weight, self.weight, padding=2).abs().sum((2, 3))
        T = 1 / (sums * (self.q - self.q[:, None]).exp()).sum(1)
        y = F.relu(self.convolve(x, self.weight, self.bias))
        return x - 2 * self.adjoint(T[:, None, None] * y)


class LiRes(Kernel):
    """The identity and a free kernel in one convolution (Hu et al., 2023)."""

    def __init__(self, channels: int, padding_mode: str) -> None:
        super().__init__(channels, padding_mode)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        eye = F.pad(torch.eye(len(self.weight))[:, :, None, None], (1, 1, 1, 1))
        return self.convolve(x, eye + self.gain * self.weight, self.bias)


class Shifts(nn.Module):
    """Two orthogonal matrices, with an eighth of the channels shifted in each direction between them (LipNeXt, 2026).

    No code is public. Its training moves along the orthogonal matrices, so a step has no transform.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, channels, 1, bias=False), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        z, eighth = self.first(x), x.shape[1] // 8
        offsets = [(1, 0), (-1, 0), (0, 1), (0, -1)]
        moved = [z[:, k * eighth : (k + 1) * eighth].roll(by, (-2, -1)) for k, by in enumerate(offsets)]
        return self.last(torch.cat([*moved, z[:, 4 * eighth :]], 1))


PUBLISHED: dict[str, Callable[..., nn.Module]] = {
    "lot": LOT, "bro": BRO, "soc": SOC, "soc_taylor": SOC, "aol": AOL, "cpl": CPL, "sll": SLL, "lires": LiRes,
    "shift": Shifts,
}  # fmt: skip
PADDINGS = ("circular", "zeros")


def step(layer: nn.Module, x: Tensor) -> float:
    """Return the seconds of a forward and a backward pass."""
    start = time.perf_counter()
    layer(x).square().sum().backward()
    return time.perf_counter() - start


def _like_published(name: str, channels: int) -> dict[str, int]:
    """Options with which our layer does as much as the published one."""
    if name in ("cpl", "sll"):
        return {"hidden": channels}
    return {"terms": 5} if name == "soc_taylor" else {}


def _reference(name: str, channels: int, padding: str) -> nn.Module | None:
    """Return the published layer, or None if it has no such padding."""
    if name == "aoc":
        conv = orthogonium_conv()
        return None if conv is None else conv(channels, channels, 3, padding=1, padding_mode=padding)
    make = PUBLISHED[name]
    if isinstance(make, type) and issubclass(make, Kernel):
        return make(channels, padding)
    return make(channels) if padding == "circular" else None


def measure(channels: int, size: int, batch: int, rounds: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the seconds of steps in turns: by padding and method, of our layer and of the published one."""
    x = torch.randn(batch, channels, size, size, requires_grad=True)
    found: dict[str, dict[str, dict[str, list[float]]]] = {padding: {} for padding in PADDINGS}
    for name in (*PUBLISHED, "aoc"):
        for padding in PADDINGS:
            if (theirs := _reference(name, channels, padding)) is None:
                continue
            ours = conv_method(name)(channels, channels, 3, padding_mode=padding, **_like_published(name, channels))
            seconds = [(step(ours, x), step(theirs, x)) for _ in range(rounds + 1)][1:]
            found[padding][name] = {"ours": [a for a, _ in seconds], "published": [b for _, b in seconds]}
            print(f"{name:12} {padding:10} ours / published {ratio(found[padding][name]):.2f}", flush=True)
    return found


def main() -> None:
    """Measure, print, and keep the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    print(f"{args.channels} channels, {args.size} x {args.size}, batch {args.batch}, {torch.get_num_threads()} threads")
    settings = {"channels": args.channels, "size": args.size, "batch": args.batch, "rounds": args.rounds}
    about = {"bench": "published", **settings, "code": code_digest(), "hardware": hardware(torch.device("cpu"))}
    found = measure(**settings)
    if args.out is not None:
        args.out.write_text(json.dumps({**about, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
