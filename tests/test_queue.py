"""The queue of records: its order, its estimate, its pauses, and what a kill at any moment leaves."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from locking import comes_true, held

from orthoconv import data
from orthoconv.lab.cli import main
from orthoconv.lab.locks import holder, locked
from orthoconv.lab.paper.queue import estimated_seconds, left_text, load_queue, missing_jobs
from orthoconv.lab.paper.records import append_record, read_records
from orthoconv.lab.paper.workers import working_processes
from orthoconv.lab.search import best_first, load_trials, trials_table
from orthoconv.train import loop

EXPERIMENT = """# 1. Norms of a small network.
title: Norms
place: here
runner: orthogonality
base: {data: digits, examples: 192, inputs: 2, model: {width: 0.125}, recipe: {batch_size: 32, augment: false}}
series: {one: {layers: {0: first}}, two: {layers: {0: first}, recipe: {lr: 0.02}}}
columns: [first]
rows: [[before_min, least, 5]]
budgets: {smoke: {recipe: {epochs: 1}, seeds: [0, 1]}, short: {}, paper: {}}
"""
TRIALS = """
base:
  data: digits
  examples: 256
  model: {width: 0.125, head: normalized}
  recipe: {epochs: 1, batch_size: 64, augment: false, loss: offset_cross_entropy}
trials: {plain: {}, linear: {recipe: {schedule: linear}}}
"""
QUEUE = (
    "- trials: trials.yaml\n- {experiment: norms, budget: smoke, only: [two]}\n- {experiment: norms, budget: smoke}\n"
)
ORDER = [("search", 0), ("search", 0), ("two", 0), ("two", 1), ("one", 0), ("one", 1)]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "norms.yaml").write_text(EXPERIMENT)
    (tmp_path / "trials.yaml").write_text(TRIALS)
    (tmp_path / "queue.yaml").write_text(QUEUE)
    return tmp_path


def left(folder: Path) -> list:
    records = read_records(folder / "results")
    return missing_jobs(load_queue(folder / "queue.yaml"), folder / "results", folder / "runs", None, records)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes that have everything imported, so that their time is that of their work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "orthoconv.lab.cli", "torch._dynamo"])  # which optimizers import
    return context


def work(folder: Path, *options: str) -> None:
    """In a process of its own: the queue, with a checkpoint after each step and its output in a file."""
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    loop._CHECKPOINT_SECONDS = 0
    main(["records", "run", "--queue", "queue.yaml", *options])


def start(processes: ForkServerContext, folder: Path, *options: str) -> BaseProcess:
    process = processes.Process(target=work, args=(folder, *options))
    process.start()
    return process


def spent(process: BaseProcess) -> float:
    """Seconds of the processor that it has had, whatever else runs here."""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return 0.0
    return sum(map(int, text.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def finish(processes: ForkServerContext, folder: Path) -> float:
    """Run a queue to its end, and return the seconds that it took of the processor."""
    process, seconds = start(processes, folder), 0.0
    while process.is_alive():
        seconds = max(seconds, spent(process))
        process.join(0.02)
    assert process.exitcode == 0, (folder / "log").read_text()
    return seconds


def what(folder: Path) -> list[tuple[str, str, str]]:
    """What the records of a queue say but for times: which run, and what it measured."""
    found = []
    for record in read_records(folder / "results"):
        metrics = {k: v for k, v in record["metrics"].items() if not k.endswith("seconds")}
        found.append((record["experiment"], record["hash"], json.dumps(metrics, sort_keys=True)))
    return sorted(found)


def check_kills(processes: ForkServerContext, here: Path, kills: int) -> None:
    """Kill a queue at random moments; it loses no record, and ends with those of a queue that was never killed."""
    assert len(left(here)) == 6
    seconds, expected = finish(processes, here), what(here)
    assert left(here) == []
    assert len({key for _, key, _ in expected}) == len(expected) == 6, "each run has one record"
    assert "missing" not in (here / "results" / "norms.md").read_text()
    for name in ("results", "runs", "log"):
        (here / name).rename(here / f"whole_{name}")
    source, killed = random.Random(0), 0
    while killed < kills:
        before, moment = read_records(here / "results"), source.uniform(0.1, 1.2) * seconds / kills
        process = start(processes, here)
        while process.is_alive() and spent(process) < moment:
            process.join(0.005)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:  # the queue was done: begin again
            assert process.exitcode == 0, (here / "log").read_text()
            assert what(here) == expected
            shutil.rmtree(here / "results")
            shutil.rmtree(here / "runs")
            continue
        killed += 1
        after = read_records(here / "results")
        assert all(record in after for record in before), "a record was lost"
    finish(processes, here)
    assert what(here) == expected, "as if it had never been killed"


@pytest.mark.slow
def test_killing_the_queue_twenty_times_loses_no_record(processes, here) -> None:
    check_kills(processes, here, 20)


def test_order_and_estimate(here, capsys) -> None:
    jobs = left(here)
    assert [(j.config["recipe"]["seed"], j.experiment) for j in jobs] == [
        (0, "search"), (0, "search"), (0, "norms"), (1, "norms"), (0, "norms"), (1, "norms")
    ]  # fmt: skip
    assert [j.name.split(": ")[-1].split(",")[0] for j in jobs] == ["plain", "linear", "two", "two", "one", "one"]
    config = jobs[0].config
    record = {"config": config, "seconds": 10.0}
    assert estimated_seconds(config, []) is None
    double = {**config, "recipe": {**config["recipe"], "epochs": 2}}
    assert estimated_seconds(double, [record]) == pytest.approx(20)
    assert "6 runs, 0.0 hours" in left_text(jobs, [record])
    main(["records", "left", "--queue", "queue.yaml"])
    assert "left: 6 runs, 0.0 hours and 6 of unknown length" in capsys.readouterr().out


def test_the_queue_of_the_package() -> None:
    entries = load_queue()
    assert {"trials": None} in entries
    missing_jobs(entries, Path("results"), Path("runs"), None, [])
    assert load_trials()


def test_bad_queues(here) -> None:
    (here / "queue.yaml").write_text("- {experimnt: eps0}\n")
    with pytest.raises(ValueError, match=r"an entry has trials, or experiment, .* got {'experimnt': 'eps0'}"):
        load_queue(here / "queue.yaml")
    (here / "queue.yaml").write_text("- {experiment: norms, only: [three]}\n")
    with pytest.raises(ValueError, match="norms has the columns one, two; got 'three'"):
        left(here)


# Trials


def test_search(here, capsys) -> None:
    main(["search", "--trials", "trials.yaml"])
    records = read_records(here / "results")
    assert [r["series"] for r in records] == ["plain", "linear"]
    best = best_first(records)[0]["metrics"]
    assert best["certified_36"] == max(r["metrics"]["certified_36"] for r in records)
    assert 0 <= best["certified_108"] <= best["certified_72"] <= best["certified_36"] <= best["clean"] <= 100
    assert set(best["mirrored"]) == {"clean", "certified_36", "certified_72", "certified_108"}
    assert all(r["seconds"] > 0 and r["cpu_seconds"] > 0 and r["hardware"]["torch"] for r in records)
    assert trials_table(records) in capsys.readouterr().out
    main(["search", "--trials", "trials.yaml"])
    assert read_records(here / "results") == records
    with pytest.raises(SystemExit, match="the trials are plain, linear; got 'best'"):
        main(["search", "--trials", "trials.yaml", "--only", "[best]"])
    (here / "trials.yaml").write_text(TRIALS.replace("{schedule: linear}", "{schedule: triangular}"))
    with pytest.raises(SystemExit, match="'linear' and 'plain' are the same configuration"):
        main(["search", "--trials", "trials.yaml"])


def test_search_uses_held_out_images_alone(here, monkeypatch) -> None:
    """Its figures do not change when the test images do, and do when the images held out do."""
    train, test = data.load("digits")

    def figures(train: data.Split, test: data.Split, name: str) -> dict:
        monkeypatch.setitem(data.DATASETS, "digits", lambda *_: (train, test))
        main(["search", "--trials", "trials.yaml", "--only", "[plain]", "--results", name, "--runs", f"{name}_runs"])
        return {k: v for k, v in read_records(here / name)[0]["metrics"].items() if "seconds" not in k}

    first = figures(train, test, "a")
    assert figures(train, data.Split(test.images * 0, test.labels), "b") == first
    images = train.images.clone()
    images[256:] = 0
    assert figures(data.Split(images, train.labels), test, "c") != first


def test_a_finalist_is_measured_once(here, capsys) -> None:
    small = ["--recipe.epochs", "1", "--model.width", "0.125", "--examples", "128", "--out", "runs/small"]
    main(["train", "--preset", "digits", *small])
    main(["search", "--finalist", "runs/small"])
    (record,) = read_records(here / "results")
    assert record["metrics"]["clean"] == pytest.approx(100 * record["epochs"][-1]["test_accuracy"])
    assert f"small: clean {record['metrics']['clean']:.2f}, certified_36" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="runs/small was measured on the test images already"):
        main(["search", "--finalist", "runs/small"])


def test_a_failed_trial_is_an_answer(here) -> None:
    wild = "{plain: {model: {conv: plain}, recipe: {lr: 1.0e+12}}"
    (here / "trials.yaml").write_text(TRIALS.replace("{plain: {}", wild))
    main(["search", "--trials", "trials.yaml", "--only", "[plain]"])
    (record,) = read_records(here / "results")
    assert "step" in record["metrics"]["failed"]
    assert "failed" in trials_table([record])


# Pauses


def state(pid: int) -> str:
    """What a process does: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().split()[2]


def check_pause_and_resume(pid: int, capsys) -> None:
    """What works on a queue is stopped, goes on, and keeps a second one away."""
    main(["records", "pause"])
    assert comes_true(lambda: state(pid) == "T")
    main(["records", "resume"])
    assert f"process {pid}, is running" in capsys.readouterr().out
    assert comes_true(lambda: state(pid) != "T")
    with pytest.raises(SystemExit, match=rf"in use by process {pid} on "):
        main(["records", "run", "--queue", "queue.yaml"])


def test_pause_and_resume(here, capsys) -> None:
    with pytest.raises(SystemExit, match="no queue runs on runs; start it with: make records"):
        main(["records", "pause"])
    with held(here / "runs" / "queue") as process:
        check_pause_and_resume(process.pid, capsys)


@pytest.mark.slow
def test_pause_and_resume_of_a_queue_that_works(processes, here, capsys) -> None:
    (here / "trials.yaml").write_text(TRIALS.replace("epochs: 1", "epochs: 4000"))
    process = start(processes, here)
    try:
        while holder(here / "runs" / "queue") is None:
            assert process.is_alive(), (here / "log").read_text()
            time.sleep(0.05)
        check_pause_and_resume(process.pid, capsys)
    finally:
        process.kill()
        process.join()


def test_half_a_record_is_no_record(tmp_path) -> None:
    """A process that is killed while it appends spoils neither what was there nor what comes after."""
    path = tmp_path / "a.jsonl"
    append_record(path, {"a": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"b": "' + "\u00e9".encode())
    assert read_records(tmp_path) == [{"a": 1}]
    append_record(path, {"c": 3})
    assert read_records(tmp_path) == [{"a": 1}, {"c": 3}]
    path.write_bytes(whole.rstrip(b"\n"))  # all but the newline
    append_record(path, {"d": 4})
    assert read_records(tmp_path) == [{"a": 1}, {"d": 4}]


@pytest.mark.slow
def test_workers_share_a_queue(processes, here) -> None:
    """They make what one process makes, each run once, but for a run that somebody else works on."""
    finish(processes, here)
    expected = what(here)
    for name in ("results", "runs"):
        (here / name).rename(here / f"alone_{name}")
    taken, digest = left(here)[0], left(here)[0].key.removeprefix("search ")
    with locked(here / "runs" / "search" / digest):
        process = start(processes, here, "--workers", "2")
        process.join()
    logs = [path.read_text() for path in sorted((here / "runs" / "queue").glob("*.log"))]
    assert process.exitcode == 1, "one run has no record"
    assert f"these runs have no record: {taken.name}" in (here / "log").read_text()
    assert len(logs) == 2
    titles = [re.findall(r"^(?:norms|search): .*(?:seed \d|linear)$", text, flags=re.M) for text in logs]
    assert len(titles[0]) + len(titles[1]) == 5, "each run once"
    assert what(here) == [record for record in expected if record[1] != digest]
    assert "missing" not in (here / "results" / "norms.md").read_text()


@pytest.mark.slow
def test_workers_pause_and_end_with_their_queue(processes, here) -> None:
    (here / "trials.yaml").write_text(TRIALS.replace("epochs: 1", "epochs: 4000"))
    process = start(processes, here, "--workers", "2")
    try:
        assert comes_true(lambda: len(working_processes(here / "runs")) == 3, 60)
        first, *workers = working_processes(here / "runs")
        assert first == process.pid
        main(["records", "pause"])
        assert comes_true(lambda: [state(pid) for pid in workers] == ["T", "T"])
        main(["records", "resume"])
        assert comes_true(lambda: "T" not in [state(pid) for pid in workers])
    finally:
        process.kill()
        process.join()
    assert comes_true(lambda: working_processes(here / "runs") == [])


@pytest.mark.parametrize("workers", ["0", "-2"])
def test_a_queue_needs_a_worker(here, workers) -> None:
    with pytest.raises(SystemExit, match=rf"workers must be a positive int, got {workers}"):
        main(["records", "run", "--queue", "queue.yaml", "--workers", workers])
    assert not (here / "runs").exists()
