"""How an experiment is run: training, a comparison of methods, norms of layers, times, or a Wasserstein distance."""

__all__ = ["RUNNERS", "Context", "Runner"]

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from orthoconv.files import read_json
from orthoconv.lab.commands import bench
from orthoconv.lab.configs import Training, digest
from orthoconv.lab.distance import CriticSpec, estimate_distance
from orthoconv.lab.evaluation import evaluate_model
from orthoconv.lab.machine import hardware
from orthoconv.lab.paper.comparison import measure_method
from orthoconv.lab.paper.records import metrics_of, run_record
from orthoconv.lab.runs import Run
from orthoconv.lab.timing import Figures
from orthoconv.lab.training import train_run
from orthoconv.modules import leaf_inputs, zeros_for
from orthoconv.nn import BaseConv2d
from orthoconv.testing import norm_ratios

Config = dict[str, Any]


class Context(NamedTuple):
    """Where a run reads its data and writes its files, and how it is evaluated.

    Attributes:
        runs: Folder with a folder for each run, named by the digest of its configuration.
        data_dir: Folder of the data set; by default its usual place.
        evaluation: Options of `evaluate_model`.
        device: Device that computes.
    """

    runs: Path
    data_dir: Path | None
    evaluation: Config
    device: torch.device = torch.device("cpu")


class Runner(NamedTuple):
    """One way to run an experiment.

    Attributes:
        resolve: Completes a configuration, of an experiment or of a record, given its seed.
        execute: Runs a complete configuration, or the part of it that is missing, and returns its record.
        is_done: Whether a record has everything that the options of the evaluation ask for.
    """

    resolve: Callable[[Config, int], Config]
    execute: Callable[[Config, Context], Config]
    is_done: Callable[[Config, Config], bool] = lambda record, evaluation: True


def _resolve_training(config: Config, seed: int) -> Config:
    return Training.of({**config, "recipe": {**config.get("recipe", {}), "seed": seed}}).config


def _trained(config: Config, context: Context) -> Run:
    """Return the run of a complete configuration after training it to the end."""
    run = Run(context.runs / digest(config), context.data_dir)
    if not run.weights_path.exists():
        train_run(run, Training.of(config), context.data_dir, resume=True, device=context.device)
    return run


def _train_and_evaluate(config: Config, context: Context) -> Config:
    run = _trained(config, context)
    test, started = run.load_data()[1], time.perf_counter()
    evaluate_model(run.load_model().to(context.device), test, run, **context.evaluation)
    record = run_record(run)
    return {**record, "evaluation_seconds": time.perf_counter() - started, "metrics": metrics_of(record)}


def _is_evaluated(record: Config, evaluation: Config) -> bool:
    figures = record.get("evaluation")
    if figures is None:  # the record of another experiment that trains the same network
        return False
    wanted = evaluation.get("attack_examples", 1000) or figures["examples"]
    enough = figures["attacked"] >= min(wanted, figures["examples"])
    as_strong = figures["apgd_iterations"] >= evaluation.get("apgd_iterations", 100)
    return bool(enough and as_strong and abs(figures["eps"] - evaluation.get("eps", 36 / 255)) < 1e-9)


def _resolve_layers(config: Config, seed: int) -> Config:
    layers = {str(index): name for index, name in config["layers"].items()}
    return {**_resolve_training(config, seed), "layers": layers, "inputs": config["inputs"]}


def _measure_norms(config: Config, context: Context) -> Config:
    """Measure |Conv(x)| / |x| for random x, before and after training, for some convolutions of a network."""
    run = _trained({k: v for k, v in config.items() if k not in {"layers", "inputs"}}, context)
    metrics: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    for when, path in (("before", run.initial_path), ("after", run.weights_path)):
        model = run.load_model(path).to(context.device)
        inputs = leaf_inputs(model, zeros_for(model, run.input_shape))
        convs = [(m, y) for _, m, y in inputs if isinstance(m, BaseConv2d)]
        for index, name in config["layers"].items():
            layer, y = convs[int(index)]
            source = torch.Generator().manual_seed(config["recipe"]["seed"])
            values = norm_ratios(layer, torch.randn(config["inputs"], *y.shape[1:], generator=source).to(y)).cpu()
            ratios.setdefault(name, {})[when] = values.tolist()
            extremes = {f"{when}_min": float(values.min()), f"{when}_max": float(values.max())}
            metrics.setdefault(name, {}).update(extremes)
    return {
        "config": config,
        "hardware": hardware(context.device),
        "seconds": 0.0,
        "metrics": metrics,
        "ratios": ratios,
    }


def _measure_times(name: str, config: Config, context: Context) -> Config:
    """Run `orthoconv bench NAME`; return the time of each method relative to Cayley, case by case."""
    folder, started = context.runs / digest(config), time.perf_counter()
    options = {k: v for k, v in config.items() if k != "bench"}
    getattr(bench, name)(**options, out=folder, device=str(context.device))
    metrics: dict[str, dict[str, float]] = {}
    for case in read_json(folder / f"{name}.json")["cases"]:
        label = "{network} {width}" if name == "networks" else "{panel} {c}-{o} k{k} n{n}"
        medians = {method: Figures(**f).train_median for method, f in case["figures"].items()}
        for method, median in medians.items():
            metrics.setdefault(method, {})[label.format(**case)] = median / medians["cayley"]
    seconds = time.perf_counter() - started
    return {"config": config, "hardware": hardware(context.device), "seconds": seconds, "metrics": metrics}


def _bench(name: str) -> Runner:
    return Runner(lambda config, seed: {"bench": name, **config}, partial(_measure_times, name))


def _measure_distance(config: Config, context: Context) -> Config:
    started = time.perf_counter()
    figures = estimate_distance(CriticSpec(**config["wasserstein"]), context.runs, context.data_dir, context.device)
    seconds = time.perf_counter() - started
    metrics = {k: v for k, v in figures.items() if isinstance(v, float)}
    return {
        "config": config,
        "hardware": hardware(context.device),
        "seconds": seconds,
        "metrics": metrics,
        "details": figures,
    }


def _compare_method(config: Config, context: Context) -> Config:
    """Train a network, and measure what methods are compared by."""
    run, started = _trained(config, context), time.perf_counter()
    figures = measure_method(run, **context.evaluation)
    about = {
        "config": config,
        "hardware": hardware(context.device),
        "seconds": sum(m.get("seconds", 0) for m in run.metrics()),
    }
    measured = {"metrics": figures, "examination": context.evaluation}
    return {**about, **measured, "evaluation_seconds": time.perf_counter() - started}


def _is_compared(record: Config, evaluation: Config) -> bool:
    done = record.get("examination")
    return done is not None and all(done.get(k, 0) >= v for k, v in evaluation.items())


RUNNERS: dict[str, Runner] = {
    "train": Runner(_resolve_training, _train_and_evaluate, _is_evaluated),
    "methods": Runner(_resolve_training, _compare_method, _is_compared),
    "orthogonality": Runner(_resolve_layers, _measure_norms),
    "bench_networks": _bench("networks"),
    "bench_layers": _bench("layers"),
    "wasserstein": Runner(
        lambda config, seed: {"wasserstein": asdict(CriticSpec(**config, seed=seed))}, _measure_distance
    ),
}
