"""Runs of several processes that torchrun starts: shared evaluation, one writer, and processes that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from orthoconv.train import TrainingError
from orthoconv.train.distributed import World, together
from orthoconv.weights import read

OPTIONS = [
    "--data", "digits", "--model.width", "0.0625", "--recipe.batch_size", "120", "--recipe.augment", "false",
    "--examples", "600", "--recipe.checkpoint_every", "2", "--threads", "1", "--device", "cpu", "--resume", "true",
]  # fmt: skip

KILLS = 4

# Without it, processes that torchrun starts again may connect to addresses of those that were killed: docs/devices.md.
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_the_loss_of_a_process_is_said(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    closed = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41200"
    ends = r"process 1 of 2 lost another one, and ends: .*there is no checkpoint yet"
    with pytest.raises(TrainingError, match=ends), together(World(1, 2), checkpoint):
        raise RuntimeError(closed)
    checkpoint.write_bytes(b"")
    resumes = r"With --resume, continue from .*checkpoint"
    with pytest.raises(TrainingError, match=resumes), together(World(1, 2), checkpoint):
        raise RuntimeError(closed)
    for world, message in ((World(0, 1), closed), (World(0, 2), "a mat of the wrong shape")):
        with pytest.raises(RuntimeError, match=r"gloo|wrong shape"), together(world, checkpoint):
            raise RuntimeError(message)


def launch(out: Path, processes: int, epochs: int, *options: str) -> subprocess.Popen[str]:
    """Start `orthoconv train` on so many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *options]
    command += ["-m", "orthoconv", "train", "--out", str(out), "--recipe.epochs", str(epochs), *OPTIONS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **FRESH_STORE}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]


def finished(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    return text


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == process.pid:
            ranks = [int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")]
            found |= dict.fromkeys(ranks, int(folder.name))
    return found


def kill_after_a_checkpoint(process: subprocess.Popen[str], out: Path, rank: int) -> None:
    """Kill one rank for good once the run has written a checkpoint."""
    deadline = time.monotonic() + 200
    while not (out / "checkpoint.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(workers(process)[rank], signal.SIGKILL)


def same_weights(one: Path, two: Path) -> bool:
    a, b = (read(folder / "model.safetensors")[0] for folder in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes of the ranks in /proc")
@pytest.mark.parametrize(
    ("processes", "killed"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(3, 0, marks=pytest.mark.long)],
)
def test_a_killed_process_ends_all_and_the_run_resumes(processes: int, killed: int, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert finished(launch(whole, processes, 2)).count("weights: ") == 1, "one process writes and prints"
    process = launch(out, processes, 2)
    kill_after_a_checkpoint(process, out, killed)
    text, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert not (out / "model.safetensors").exists()
    assert "lost another one, and ends" in text or "SIGKILL" in text
    finished(launch(out, processes, 2))
    assert same_weights(whole, out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert json.loads((out / "config.json").read_text())["processes"] == processes


def kill_at_a_random_moment(process: subprocess.Popen[str], r: random.Random, seconds: float) -> bool:
    """Kill a random rank for good within so many seconds; return whether the run had not ended before."""
    try:
        process.wait(r.uniform(0, seconds))
    except subprocess.TimeoutExpired:
        ranks = sorted(workers(process).items())
        os.kill(r.choice(ranks)[1] if ranks else process.pid, signal.SIGKILL)
    process.communicate(timeout=280)
    return process.returncode != 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes of the ranks in /proc")
def test_a_run_of_two_processes_that_is_killed_at_random_moments(tmp_path: Path) -> None:
    whole, out, r = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    started = time.monotonic()
    finished(launch(whole, 2, 3))
    seconds, kills, steps = time.monotonic() - started, 0, list[int]()
    while kills < KILLS and kill_at_a_random_moment(launch(out, 2, 3), r, seconds):
        kills += 1
        checkpoint = out / "checkpoint.safetensors"
        steps.append(read(checkpoint)[1]["state"]["done"] if checkpoint.exists() else 0)
    finished(launch(out, 2, 3))
    print(f"two processes: killed {kills} times, with checkpoints of the steps {steps}; the same weights in the end")
    assert kills > 0
    assert same_weights(whole, out)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes of the ranks in /proc")
def test_torchrun_restarts_a_run_by_itself(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "killed"
    finished(launch(whole, 2, 2))
    process = launch(out, 2, 2, "--max-restarts=1")
    kill_after_a_checkpoint(process, out, 1)
    finished(process)
    assert same_weights(whole, out)
