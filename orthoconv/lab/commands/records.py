"""`orthoconv records`: fill the tables, one missing run after another, in the background."""

__all__ = ["left", "pause", "resume", "run"]

import os
import signal
from pathlib import Path

from orthoconv.lab.evaluation import BrokenCertificateError
from orthoconv.lab.locks import LockedError, holder, locked
from orthoconv.lab.machine import use_device
from orthoconv.lab.paper.queue import left_text, load_queue, missing_jobs, render_tables
from orthoconv.lab.paper.records import read_records
from orthoconv.train import CheckpointError, TrainingError


def run(
    queue: Path | None = None,
    results: Path = Path("results"),
    runs: Path = Path("runs"),
    data_dir: Path | None = None,
    most: int = 0,
    device: str = "auto",
) -> None:
    """Run what is missing in the tables, one run after another, at the lowest priority.

    It may be killed at any moment. Started again, it continues from the last checkpoint, at most three minutes old.
    `make records` sets OMP_WAIT_POLICY=passive in the environment, so that waiting threads leave the cores to others.

    Example: orthoconv records run --most 1

    Args:
        queue: File with the order of the runs; by default that of the package.
        results: Folder to which records and tables are written.
        runs: Folder for the runs themselves.
        data_dir: Folder of the data set; by default its usual place.
        most: Number of runs after which to stop; 0 for all.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    os.nice(19)
    entries, done, place = load_queue(queue), 0, use_device(device)
    failed: dict[str, str] = {}
    with locked(runs / "queue"):
        render_tables(entries, results)  # the last queue may have been killed before it did
        while not most or done < most:
            records = read_records(results)
            jobs = [job for job in missing_jobs(entries, results, runs, data_dir, records) if job.key not in failed]
            print(left_text(jobs, records), flush=True)
            if not jobs:
                break
            try:
                jobs[0].run(place)
                done += 1
            except (BrokenCertificateError, CheckpointError, LockedError, TrainingError) as error:
                failed[jobs[0].key] = jobs[0].name
                print(f"{jobs[0].name}: {error}; the queue goes on without it", flush=True)
            render_tables([entry for entry in entries if entry.get("experiment") == jobs[0].experiment], results)
    if failed:
        raise ValueError(f"these runs have no record: {', '.join(failed.values())}")


def left(
    queue: Path | None = None, results: Path = Path("results"), runs: Path = Path("runs"), data_dir: Path | None = None
) -> None:
    """Say which runs are missing in the tables, and how long they will take.

    Example: orthoconv records left

    Args:
        queue: File with the order of the runs; by default that of the package.
        results: Folder of the records.
        runs: Folder of the runs.
        data_dir: Folder of the data set; by default its usual place.
    """
    records = read_records(results)
    jobs = missing_jobs(load_queue(queue), results, runs, data_dir, records)
    print("\n".join(job.name for job in jobs))
    print(left_text(jobs, records))


def pause(runs: Path = Path("runs")) -> None:
    """Stop the queue for the time of a benchmark; it keeps its memory and loses nothing.

    Example: orthoconv records pause

    Args:
        runs: Folder of the runs.
    """
    _send(runs, signal.SIGSTOP, "paused")


def resume(runs: Path = Path("runs")) -> None:
    """Let a paused queue continue.

    Example: orthoconv records resume

    Args:
        runs: Folder of the runs.
    """
    _send(runs, signal.SIGCONT, "running")


def _send(runs: Path, number: signal.Signals, state: str) -> None:
    process = holder(runs / "queue")
    if process is None:
        raise ValueError(f"no queue runs on {runs}; start it with: make records")
    os.kill(process, number)
    print(f"the queue, process {process}, is {state}")
