"""The queue of runs that have no record yet, in the order in which they are wanted."""

__all__ = ["Job", "estimated_seconds", "left_text", "load_queue", "missing_jobs", "render_tables"]

import statistics
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]

from orthoconv.lab.paper.completion import complete_case, title_of
from orthoconv.lab.paper.experiment import Case, Experiment, load_experiment
from orthoconv.lab.paper.pages import write_pages
from orthoconv.lab.paper.records import Record
from orthoconv.lab.paper.runners import Context
from orthoconv.lab.paper.tables import made_runs
from orthoconv.lab.search import complete_trial, has_record, load_trials

_FIELDS = {"trials", "experiment", "budget", "only", "seeds"}
_ALL_IMAGES = 50_000  # of a configuration that does not say how many
_KEYS = ("name", "conv", "width", "kernel_size")  # what the time of a network depends on most


class Job(NamedTuple):
    """A run that has no record yet.

    Attributes:
        key: What identifies it.
        experiment: Experiment that it belongs to.
        group: Experiment and budget.
        name: What it is called.
        config: Its configuration.
        run: Runs it on a device from its checkpoint, and appends its record.
    """

    key: str
    experiment: str
    group: str
    name: str
    config: dict[str, Any]
    run: Callable[[torch.device], None]


def load_queue(path: Path | None = None) -> list[dict[str, Any]]:
    """Read a queue: entries with `trials`, a file or null for that of the package, or with `experiment` and `budget`.

    Arguments:
        path: File; by default that of the package.
    """
    source = files("orthoconv.lab.paper") / "queue.yaml" if path is None else path
    entries = yaml.safe_load(source.read_text())
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or set(entry) - _FIELDS or not {"trials", "experiment"} & set(entry):
            raise ValueError(f"{source}: an entry has trials, or experiment, budget, only and seeds; got {entry!r}")
    return list(entries)


def missing_jobs(
    entries: list[dict[str, Any]], results: Path, runs: Path, data_dir: Path | None, records: list[Record]
) -> list[Job]:
    """Return the runs of a queue that have no record, each once, in order.

    Arguments:
        entries: The queue.
        results: Folder to which records are appended.
        runs: Folder for the runs themselves.
        data_dir: Folder of the data set; by default its usual place.
        records: The records that there are.
    """
    jobs: dict[str, Job] = {}
    for entry in entries:
        found = _trials if "trials" in entry else _cases
        for job in found(entry, results, runs, data_dir, records):
            jobs.setdefault(job.key, job)
    return list(jobs.values())


def _trials(
    entry: dict[str, Any], results: Path, runs: Path, data_dir: Path | None, records: list[Record]
) -> list[Job]:
    jobs = []
    for trial in load_trials(Path(entry["trials"]) if entry["trials"] else None):
        if not has_record(trial, records):
            run = partial(complete_trial, trial, results, runs / "search", data_dir)
            key = f"search {trial.training.hash}"
            jobs.append(Job(key, "search", "search", trial.name, trial.training.config, run))
    return jobs


def _cases(entry: dict[str, Any], results: Path, runs: Path, data_dir: Path | None, records: list[Record]) -> list[Job]:
    experiment, budget = load_experiment(entry["experiment"]), entry.get("budget", "short")
    only, seeds = entry.get("only") or experiment.series, entry.get("seeds")
    if unknown := [column for column in only if column not in experiment.series]:
        raise ValueError(f"{experiment.name} has the columns {', '.join(experiment.series)}; got {unknown[0]!r}")
    cases, jobs = experiment.cases(budget), []
    done = [case for case, _ in made_runs(cases, experiment, records)]
    for case in cases:
        if case.series in only and (seeds is None or case.seed in seeds) and case not in done:
            context = Context(runs / "reproduce", data_dir, case.evaluation)
            run = partial(_complete, experiment, budget, case, results, context)
            group, name = f"{experiment.name}, {budget}", title_of(experiment, case)
            jobs.append(Job(case.hash, experiment.name, group, name, case.config, run))
    return jobs


def _complete(
    experiment: Experiment, budget: str, case: Case, results: Path, context: Context, device: torch.device
) -> None:
    complete_case(experiment, budget, case, results, context._replace(device=device))


def render_tables(entries: list[dict[str, Any]], results: Path) -> None:
    """Write the tables of the experiments of a queue, each once."""
    wanted = {entry["experiment"]: entry.get("budget") == "smoke" for entry in entries if "experiment" in entry}
    for name, smoke in wanted.items():
        write_pages(load_experiment(name), results, smoke=smoke)


def estimated_seconds(config: dict[str, Any], records: list[Record]) -> float | None:
    """Estimate the time of a run by records of the same network, or else of the same name; None if there is none.

    Arguments:
        config: Configuration of the run.
        records: Records with the seconds that each took.
    """
    if "recipe" not in config:
        same = [record["seconds"] for record in records if record["config"].keys() == config.keys()]
        return float(statistics.median(same)) if same else None
    for keys in (_KEYS, _KEYS[:2], _KEYS[:1]):
        rates = [
            record["seconds"] / _passes(record["config"])
            for record in records
            if "recipe" in record["config"] and _alike(record["config"]["model"], config["model"], keys)
        ]
        if rates:
            return float(statistics.median(rates)) * _passes(config)
    return None


def _alike(a: dict[str, Any], b: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return all(a.get(key) == b.get(key) for key in keys)


def _passes(config: dict[str, Any]) -> int:
    """Return how many images a run looks at."""
    return int(config["recipe"]["epochs"]) * int(config.get("examples") or _ALL_IMAGES)


def left_text(jobs: list[Job], records: list[Record]) -> str:
    """Say how many runs of each group are left, and how long they will take."""
    groups: dict[str, list[float | None]] = {}
    for job in jobs:
        groups.setdefault(job.group, []).append(estimated_seconds(job.config, records))
    lines = [f"  {group}: {_text(times)}" for group, times in groups.items()]
    return "\n".join([f"left: {_text([t for times in groups.values() for t in times])}", *lines])


def _text(times: list[float | None]) -> str:
    """Describe a number of runs and their time.

    >>> _text([3600.0, None])
    '2 runs, 1.0 hours and 1 of unknown length'
    """
    known = [time for time in times if time is not None]
    rest = f" and {len(times) - len(known)} of unknown length" if len(known) < len(times) else ""
    return f"{len(times)} runs, {sum(known) / 3600:.1f} hours{rest}"
