"""Operations of a training step, plain and Cayley, and their rates: `python benchmarks/operations.py FILE...`.

Counted are the products of matrices: forward, and twice as much backward (once, for the weights, in the first layer).
Transforms, additions and copies are not, so a rate is a lower bound. The files are those of `orthoconv bench networks`.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

from orthoconv import models
from orthoconv.nn import CircularConv2d


def plain_conv(b: int, i: int, o: int, k: int, n: int, first: bool) -> float:
    """A k x k convolution of b images of n x n pixels."""
    return (2 if first else 3) * 2.0 * b * n * n * i * o * k * k


def cayley_conv(b: int, i: int, o: int, k: int, n: int, first: bool) -> float:
    """The same by matrices of f frequencies: products with pixels; an inverse, or factors; sums over taps."""
    if k == 1:
        return plain_conv(b, i, o, 1, n, first)
    m, f = min(i, o), (n * n + 4) // 2 if n <= 8 else n * (n // 2 + 1)
    inverse = 8 * m**3 if m <= max(b, 128) else 8 / 3 * m**3
    taps = 2 * k * k + ((2 * k - 1) ** 2 if i != o else 0)
    formed = 8 * m * m * (max(i, o) - m) if m <= max(b, 128) else 0
    return f * (3 * 8.0 * b * i * o + inverse + formed + 2 * 8 * taps * m * m)


def plain_linear(b: int, i: int, o: int) -> float:
    """A linear layer on b rows."""
    return 3 * 2.0 * b * i * o


def cayley_linear(b: int, i: int, o: int) -> float:
    """Besides, V V^T and its derivative, and the factors of M."""
    return plain_linear(b, i, o) + 2 * (1.6 if 2 * b >= o else 0.6) * o * o * (i - o) + 2 / 3 * o**3 + 6 * b * o * o


def count(name: str, width: int, b: int) -> tuple[float, float]:
    """Operations of a step with plain and with Cayley layers."""
    model, sizes = models.build(name, conv="plain", width=width), {}
    for module in model.modules():
        if isinstance(module, CircularConv2d):
            module.register_forward_hook(lambda m, _, y: sizes.update({m: y.shape[-1]}))
    model(torch.zeros(1, 3, 32, 32))
    plain = cayley = 0.0
    for module in model.modules():
        if isinstance(module, CircularConv2d):
            o, i, k, _ = module.kernel_shape
            case = (b, i, o, k, sizes[module], module.in_channels == 3)
            plain, cayley = plain + plain_conv(*case), cayley + cayley_conv(*case)
        elif isinstance(module, nn.Linear):
            case = (b, module.in_features, module.out_features)
            plain, cayley = plain + plain_linear(*case), cayley + cayley_linear(*case)
    return plain, cayley


def peak_rate(n: int = 1024) -> float:
    """Operations per second of a product of matrices, the best of ten."""
    a, best = torch.randn(n, n), float("inf")
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def main(paths: list[str]) -> None:
    """Print one line per network."""
    print(f"products of 1024 x 1024 matrices: {peak_rate() / 1e9:.0f} Gop/s")
    print(f"{'network':24}{'Gop plain':>10}{'Cayley':>8}{'ratio':>7}{'Gop/s plain':>13}{'Cayley':>8}")
    for case in (case for path in paths for case in json.loads(Path(path).read_text())["cases"]):
        counts = count(case["network"], case["width"], case["batch"])
        seconds = [statistics.median(case["figures"][method]["train"]) for method in ("plain", "cayley")]
        rates = [n / t for n, t in zip(counts, seconds, strict=True)]
        label = f"{case['network']}, width {case['width']}"
        print(
            f"{label:24}{counts[0] / 1e9:10.1f}{counts[1] / 1e9:8.1f}{counts[1] / counts[0]:7.2f}"
            f"{rates[0] / 1e9:13.0f}{rates[1] / 1e9:8.0f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
