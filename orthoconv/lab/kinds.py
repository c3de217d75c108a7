"""What an experiment can be: how its configuration is completed, how it is run, and which figures come of it."""

__all__ = ["KINDS", "Context", "Kind", "metrics_of"]

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from orthoconv.data import load
from orthoconv.lab import bench
from orthoconv.lab.evaluation import evaluate_model
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import ModelSpec, Run, digest, hardware, run_record
from orthoconv.lab.timing import Figures
from orthoconv.lab.training import train
from orthoconv.lab.wasserstein import CriticSpec, estimate_distance
from orthoconv.nn.base import BaseConv2d
from orthoconv.testing import norm_ratios
from orthoconv.tracing import calls
from orthoconv.train import Recipe

Config = dict[str, Any]


class Context(NamedTuple):
    """Where a run finds its data and leaves its files: a folder for each configuration."""

    runs: Path
    data_dir: Path | None
    evaluation: dict[str, Any]


class Kind(NamedTuple):
    """A kind of experiment.

    Attributes:
        resolve: The whole configuration, from what the experiment says of it and a seed.
        execute: Runs it, or what is missing of it, and returns its record.
        done: Whether a record has all that the options of the evaluation ask for.
    """

    resolve: Callable[[Config, int], Config]
    execute: Callable[[Config, Context], Config]
    done: Callable[[Config, Config], bool]


def metrics_of(record: Config) -> Config:
    """The figures of a record: by name, or by column and name."""
    if "metrics" in record:
        found: Config = record["metrics"]
        return found
    e = record["evaluation"]
    percent = {k: 100 * e[k] for k in ("clean", "pgd", "apgd_ce", "apgd_dlr", "autoattack")}
    percent["certified"] = 100 * e["certified_at_eps"]
    return {**percent, "empirical_lipschitz": e["empirical_lipschitz"], "lipschitz_bound": e["lipschitz_bound"]}


# A network, trained and evaluated


def _training(config: Config, seed: int) -> Config:
    """The configuration of `orthoconv train`, as far as the weights depend on it."""
    recipe = asdict(Recipe(**{**config.get("recipe", {}), "seed": seed}))
    del recipe["checkpoint_every"]
    model = asdict(ModelSpec(**config.get("model", {})))
    if model["learned_scale"]:  # an option younger than some records, whose runs were like this
        del model["learned_scale"]
    return {"data": config["data"], "examples": config.get("examples", 0), "model": model, "recipe": recipe}


def _trained(config: Config, context: Context) -> Run:
    """The folder of the run with this configuration, trained to the end."""
    run = Run(context.runs / digest(config))
    if not run.weights_path.exists():
        recipe, model = Recipe(**config["recipe"]), ModelSpec(**config["model"])
        train(run.folder, config["data"], context.data_dir, model, recipe, resume=True, examples=config["examples"])
    return run


def _train_and_evaluate(config: Config, context: Context) -> Config:
    run = _trained(config, context)
    training, test = load(config["data"], context.data_dir, download_bar())
    started = time.perf_counter()
    evaluate_model(run.load_model(training), test, run, **context.evaluation)
    record = run_record(run)
    return {**record, "evaluation_seconds": time.perf_counter() - started, "metrics": metrics_of(record)}


def _evaluated(record: Config, evaluation: Config) -> bool:
    found = record.get("evaluation")
    if found is None:  # of another kind, that trains the same network
        return False
    wanted = evaluation.get("attack_examples", 1000) or found["examples"]
    enough = found["attacked"] >= min(wanted, found["examples"])
    as_strong = found["apgd_iterations"] >= evaluation.get("apgd_iterations", 100)
    return bool(enough and as_strong and abs(found["eps"] - evaluation.get("eps", 36 / 255)) < 1e-9)


# Norms before and after learning


def _layers(config: Config, seed: int) -> Config:
    layers = {str(index): name for index, name in config["layers"].items()}
    return {**_training(config, seed), "layers": layers, "inputs": config["inputs"]}


def _orthogonality(config: Config, context: Context) -> Config:
    """|Conv(x)| / |x| for random x, before and after learning, of some convolutions of a network."""
    run = _trained({k: v for k, v in config.items() if k not in {"layers", "inputs"}}, context)
    training, _ = load(config["data"], context.data_dir, download_bar())
    metrics: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    for when, path in (("before", run.initial_path), ("after", run.weights_path)):
        model = run.load_model(training, path)
        seen = [(m, y) for _, m, y in calls(model, training.images[:1]) if isinstance(m, BaseConv2d)]
        for index, name in config["layers"].items():
            layer, y = seen[int(index)]
            shape = y.shape[1:]
            x = torch.randn(config["inputs"], *shape, generator=torch.Generator().manual_seed(config["recipe"]["seed"]))
            found = norm_ratios(layer, x)
            ratios.setdefault(name, {})[when] = found.tolist()
            range_ = {f"{when}_min": float(found.min()), f"{when}_max": float(found.max())}
            metrics.setdefault(name, {}).update(range_)
    return {"config": config, "hardware": hardware(), "seconds": 0.0, "metrics": metrics, "ratios": ratios}


# Times


def _bench(name: str) -> Kind:
    def execute(config: Config, context: Context) -> Config:
        folder, started = context.runs / digest(config), time.perf_counter()
        options = {k: v for k, v in config.items() if k != "bench"}
        getattr(bench, name)(**options, out=folder)
        written = json.loads((folder / f"{name}.json").read_text())
        metrics: dict[str, dict[str, float]] = {}
        for case in written["cases"]:
            figures = {method: Figures(**f) for method, f in case["figures"].items()}
            base = figures["cayley"].train_median
            label = f"{case['network']} {case['width']}" if name == "networks" else f"{case['panel']} {_varied(case)}"
            for method, f in figures.items():
                metrics.setdefault(method, {})[label] = f.train_median / base
        seconds = time.perf_counter() - started
        return {"config": config, "hardware": hardware(), "seconds": seconds, "metrics": metrics}

    return Kind(lambda config, seed: {"bench": name, **config}, execute, lambda record, evaluation: True)


def _varied(case: Config) -> str:
    return f"{case['c']}-{case['o']} k{case['k']} n{case['n']}"


# Wasserstein distance


def _critic(config: Config, seed: int) -> Config:
    return {"wasserstein": asdict(CriticSpec(**config, seed=seed))}


def _wasserstein(config: Config, context: Context) -> Config:
    started = time.perf_counter()
    figures = estimate_distance(CriticSpec(**config["wasserstein"]), context.runs, context.data_dir)
    seconds = time.perf_counter() - started
    metrics = {k: v for k, v in figures.items() if isinstance(v, float)}
    return {"config": config, "hardware": hardware(), "seconds": seconds, "metrics": metrics, "details": figures}


KINDS: dict[str, Kind] = {
    "train": Kind(_training, _train_and_evaluate, _evaluated),
    "orthogonality": Kind(_layers, _orthogonality, lambda record, evaluation: True),
    "bench_networks": _bench("networks"),
    "bench_layers": _bench("layers"),
    "wasserstein": Kind(_critic, _wasserstein, lambda record, evaluation: True),
}
