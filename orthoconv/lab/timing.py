"""Time and memory of several models, measured in turns so that their ratios can be trusted."""

__all__ = ["Figures", "compare", "peak_bytes", "pin_threads"]

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces its start and stop otherwise


@dataclass(frozen=True)
class Figures:
    """What was measured of a model.

    Attributes:
        train: Seconds of each training step, in order.
        evaluate: Seconds of each eval step, in order.
        peak: Bytes at the peak of a training step.
    """

    train: list[float]
    evaluate: list[float]
    peak: int

    @property
    def train_median(self) -> float:
        return statistics.median(self.train)

    @property
    def evaluate_median(self) -> float:
        return statistics.median(self.evaluate)

    @property
    def spread(self) -> float:
        """Distance between the quartiles of the training steps, relative to the median."""
        if len(self.train) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.train, n=4, method="inclusive")
        return (high - low) / self.train_median


def compare(models: Mapping[str, nn.Module], x: Tensor, rounds: int, tick: Callable[[], Any]) -> dict[str, Figures]:
    """Measure each model on a batch.

    The models take turns within each round: other work of the machine then slows all of them. Each has two steps
    before it is measured. A training step is the forward and the backward pass. An eval step is the forward pass in
    inference mode, with cached operators.

    Arguments:
        models: Models by name.
        x: The batch.
        rounds: Steps of each model that are measured.
        tick: Called after each turn of a model.
    """
    steps = {name: partial(_train_step, model.train(), x) for name, model in models.items()}
    peaks = {name: peak_bytes(step, x.device) for name, step in steps.items()}
    train = _take_turns(steps, rounds, tick)
    for model in models.values():
        model.eval()
    with parametrize.cached(), torch.inference_mode():
        evaluate = _take_turns({name: partial(_eval_step, model, x) for name, model in models.items()}, rounds, tick)
    return {name: Figures(train[name], evaluate[name], peaks[name]) for name in models}


def peak_bytes(step: Step, device: torch.device = torch.device("cpu")) -> int:  # noqa: B008
    """Return the most bytes that torch had allocated at one time during a step, beyond those before it.

    An accelerator counts them itself; 0 if it does not.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        counts = hasattr(module, "max_memory_allocated")
        if counts:
            module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device) if counts else 0
        step()
        return int(module.max_memory_allocated(device)) - before if counts else 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    total = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def pin_threads(threads: int | None) -> int:
    """Use so many threads, each on its own core if the system allows it; by default as many as torch does."""
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be positive, got {threads}")
        torch.set_num_threads(threads)
    count = torch.get_num_threads()
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[:count])
    return count


def _take_turns(steps: Mapping[str, Step], rounds: int, tick: Callable[[], Any]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for k in range(rounds + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if k:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
                tick()
    finally:
        gc.enable()
    return seconds


def _train_step(model: nn.Module, x: Tensor) -> None:
    y = model(x)
    y.backward(torch.ones_like(y))
    model.zero_grad(set_to_none=True)
    x.grad = None
    _wait(x.device)


def _eval_step(model: nn.Module, x: Tensor) -> None:
    model(x)
    _wait(x.device)


def _wait(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
