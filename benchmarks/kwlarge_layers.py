"""Each layer of KWLarge against the paper's listing and the plain layer: `python benchmarks/kwlarge_layers.py`.

Forward and backward in float32, batch 256. The methods take turns within each round; figures are medians.
"""

import statistics
import time

import torch
from listing import ListingConv2d, ListingLinear
from torch import Tensor, nn

from orthoconv.nn import CayleyConv2d, CayleyLinear

BATCH, ROUNDS = 256, 15
CONVS = [(3, 32, 3, 1, 32), (32, 32, 3, 2, 32), (32, 64, 3, 1, 16), (64, 64, 3, 2, 16)]
LINEARS = [(4096, 512), (512, 512), (512, 10)]


def step(layer: nn.Module, x: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    start = time.perf_counter()
    y = layer(x)
    y.backward(torch.ones_like(y))
    return time.perf_counter() - start


def compare(layers: dict[str, nn.Module], x: Tensor) -> dict[str, float]:
    """Median milliseconds of each layer, taking turns."""
    times = {name: [step(layer, x) for _ in range(2)][:0] for name, layer in layers.items()}
    for _ in range(ROUNDS):
        for name, layer in layers.items():
            times[name].append(step(layer, x))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print one line per layer."""
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; ms, and ratios to CayleyConv2d / CayleyLinear"
    )
    print(f"{'layer':24}{'listing':>10}{'ours':>10}{'plain':>10}{'listing/ours':>14}{'ours/plain':>12}")
    cases: list[tuple[str, dict[str, nn.Module], Tensor]] = []
    for i, o, k, s, n in CONVS:
        plain = nn.Conv2d(i, o, k, s, padding=(k - 1) // 2, padding_mode="circular")
        layers = {"listing": ListingConv2d(i, o, k, s), "ours": CayleyConv2d(i, o, k, s), "plain": plain}
        cases.append((f"conv {i} -> {o} / {s}, {n}x{n}", layers, torch.randn(BATCH, i, n, n, requires_grad=i != 3)))
    for i, o in LINEARS:
        layers = {"listing": ListingLinear(i, o), "ours": CayleyLinear(i, o), "plain": nn.Linear(i, o)}
        cases.append((f"linear {i} -> {o}", layers, torch.randn(BATCH, i, requires_grad=True)))
    for name, layers, x in cases:
        t = compare(layers, x)
        figures = "".join(f"{t[m]:10.1f}" for m in t)
        print(f"{name:24}{figures}{t['listing'] / t['ours']:14.2f}{t['ours'] / t['plain']:12.2f}")


if __name__ == "__main__":
    main()
