"""`orthoconv bench`: time every method against the plain one, in the same run."""

__all__ = ["layers", "networks", "regimes"]

from collections.abc import Sequence
from pathlib import Path

import torch

from orthoconv import models
from orthoconv.lab import plots
from orthoconv.lab.benchmark import BATCHES, PANELS, PAPER, REGIMES, Benchmark
from orthoconv.lab.machine import use_device


def networks(
    names: Sequence[str] = ("kwlarge", "resnet9", "wide_resnet10_10"),
    widths: Sequence[int] = (1, 2, 3),
    methods: Sequence[str] | None = None,
    rounds: int = 5,
    batch: int | None = None,
    threads: int | None = None,
    keep_memory: bool = False,
    out: Path = Path("runs/bench"),
    device: str = "auto",
) -> None:
    """Time networks with each method's layers: the paper's two runtime tables.

    Example: orthoconv bench networks --names [kwlarge] --widths [1] --rounds 3

    Args:
        names: kwlarge, resnet9, wide_resnet10_10.
        widths: Factors of the channels of kwlarge; the others are timed as they are.
        methods: Columns; by default all. `listing` needs the folder benchmarks, `orthogonium` (its AOC) that package.
        rounds: Steps of each method that are measured, taking turns.
        batch: Images in a batch; by default 256, 128 and 32 for the three networks.
        threads: Threads to use.
        keep_memory: Whether the allocator keeps freed memory, as in `orthoconv train`.
        out: Folder of the JSON file and the picture.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    cases = [(name, width) for name in names for width in (widths if name == "kwlarge" else [1])]
    if unknown := [name for name in names if name not in models.NETWORKS]:
        raise ValueError(f"names must be among {', '.join(models.NETWORKS)}, got {', '.join(unknown)}")
    bench = Benchmark("networks", methods, rounds, threads, keep_memory, out, use_device(device))
    for name, width in cases:
        b = batch or BATCHES[name]
        built = {method: bench.network(method, name, width) for method in bench.methods}
        paper = PAPER.get((name, width), {})
        bench.run({"network": name, "width": width, "batch": b}, built, torch.randn(b, 3, 32, 32), paper)
    bench.draw(plots.bench_networks)


def layers(
    panels: Sequence[str] = tuple(PANELS),
    methods: Sequence[str] | None = None,
    rounds: int = 7,
    batch: int = 128,
    threads: int | None = None,
    keep_memory: bool = False,
    out: Path = Path("runs/bench"),
    device: str = "auto",
) -> None:
    """Time one layer of each method against image size, channels, kernel size, and the ratio of channels.

    Example: orthoconv bench layers --panels [a] --methods [cayley,plain]

    Args:
        panels: Of the paper's runtime figure, a to f.
        methods: Columns, as for networks.
        rounds: Steps of each method that are measured, taking turns.
        batch: Images in a batch.
        threads: Threads to use.
        keep_memory: Whether the allocator keeps freed memory, as in `orthoconv train`.
        out: Folder of the JSON file and the picture.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    if unknown := [panel for panel in panels if panel not in PANELS]:
        raise ValueError(f"panels must be among {', '.join(PANELS)}, got {', '.join(unknown)}")
    bench = Benchmark("layers", methods, rounds, threads, keep_memory, out, use_device(device))
    for panel in panels:
        title, cases = PANELS[panel]
        for case in cases:
            built = {method: bench.conv(method)(case["c"], case["o"], case["k"]) for method in bench.methods}
            x = torch.randn(batch, case["c"], case["n"], case["n"], requires_grad=True)
            bench.run({"panel": panel, "title": title, **case, "batch": batch}, built, x, {})
    bench.draw(plots.bench_layers)


def regimes(
    methods: Sequence[str] = ("plain", "cayley", "lot", "soc", "bcop", "rko", "aoc"),
    rounds: int = 3,
    threads: int | None = None,
    keep_memory: bool = False,
    out: Path = Path("runs/bench"),
    device: str = "auto",
) -> None:
    """Time one layer of each orthogonal method for small and large batches, images and numbers of channels.

    Example: orthoconv bench regimes --methods [cayley,plain] --rounds 1

    Args:
        methods: Columns, as for networks.
        rounds: Steps of each method that are measured, taking turns.
        threads: Threads to use.
        keep_memory: Whether the allocator keeps freed memory, as in `orthoconv train`.
        out: Folder of the JSON file.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    bench = Benchmark("regimes", methods, rounds, threads, keep_memory, out, use_device(device))
    for case in REGIMES:
        built = {method: bench.conv(method)(case["c"], case["c"], 3) for method in bench.methods}
        x = torch.randn(case["b"], case["c"], case["n"], case["n"], requires_grad=True)
        bench.run(case, built, x, {})
    print(f"\n{bench.path}")
