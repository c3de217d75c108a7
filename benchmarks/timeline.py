"""One training step of KWLarge, layer by layer: `python benchmarks/timeline.py` writes results/timeline.json.

Times are those of the processor on one thread, which other jobs on the machine change little; medians over the rounds.
"""

import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from orthoconv import models
from orthoconv.lab.machine import hardware
from orthoconv.train import hinge_loss

Span = tuple[str, float, float]
PATH = Path(__file__).parents[1] / "results" / "timeline.json"
BATCH, ROUNDS = 256, 5


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> list[tuple[str, float]]:
    """Run one step; return what was done and its milliseconds, in order."""
    spans: list[tuple[str, float]] = []
    arrived: dict[int, float] = {}  # when the gradient of each output came
    names = [_name(layer) for layer in model]
    for k, layer in enumerate(model):
        started = time.thread_time()
        x = layer(x)
        spans.append((f"{names[k]} forward", time.thread_time() - started))
        x.register_hook(partial(_note, arrived, k))
    started = time.thread_time()
    loss = hinge_loss(x, labels, 0.5)
    spans.append(("loss", time.thread_time() - started))
    optimizer.zero_grad()
    loss.backward()
    arrived[-1] = time.thread_time()
    spans += [(f"{names[k]} backward", arrived[k - 1] - arrived[k]) for k in reversed(range(len(model)))]
    started = time.thread_time()
    optimizer.step()
    spans.append(("Adam", time.thread_time() - started))
    return [(name, 1000 * seconds) for name, seconds in spans]


def _note(arrived: dict[int, float], k: int, gradient: Tensor) -> None:
    arrived.setdefault(k, time.thread_time())


def _name(layer: nn.Module) -> str:
    kind = type(layer).__name__
    return next((word for part, word in (("Conv2d", "conv"), ("Linear", "linear")) if part in kind), kind)


def measure(method: str) -> list[Span]:
    """Return the spans of a step of KWLarge, by their medians."""
    torch.manual_seed(0)
    model = models.build("kwlarge", method)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, labels = torch.rand(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    rounds = [step(model, optimizer, x, labels) for _ in range(ROUNDS + 1)][1:]
    spans, at = [], 0.0
    for parts in zip(*rounds, strict=True):
        length = statistics.median(ms for _, ms in parts)
        spans.append((parts[0][0], round(at, 3), round(at + length, 3)))
        at += length
    return spans


def main() -> None:
    """Measure plain and Cayley layers, and write the record."""
    torch.set_num_threads(1)
    found = {method: measure(method) for method in ("plain", "cayley")}
    record = {
        "network": "kwlarge",
        "batch": BATCH,
        "rounds": ROUNDS,
        "hardware": hardware(torch.device("cpu")),
        "methods": found,
    }
    PATH.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
