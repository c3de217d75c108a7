"""`orthoconv records`: fill the tables, one missing run after another, in the background."""

__all__ = ["left", "pause", "resume", "run"]

import os
import signal
from pathlib import Path

from orthoconv.lab.locks import locked
from orthoconv.lab.paper.queue import left_text, load_queue, missing_jobs
from orthoconv.lab.paper.records import read_records
from orthoconv.lab.paper.workers import Desk, work, work_together, working_processes
from orthoconv.nn.arguments import positive_int


def run(
    queue: Path | None = None,
    results: Path = Path("results"),
    runs: Path = Path("runs"),
    data_dir: Path | None = None,
    most: int = 0,
    device: str = "auto",
    workers: int = 1,
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
        most: Number of runs after which to stop, or after which each worker stops; 0 for all.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        workers: Number of processes that share the runs and the threads. On a CPU, two with one thread each make more
            runs an hour than one with two threads. Each writes to a log in RUNS/queue.
    """
    os.nice(19)
    positive_int("workers", workers)
    desk = Desk(queue, results, runs, data_dir, device)
    with locked(runs / "queue"):
        failed = work(desk, most) if workers == 1 else work_together(desk, workers, most)
    if failed:
        raise ValueError(f"these runs have no record: {', '.join(failed)}")


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
    processes = working_processes(runs)
    if not processes:
        raise ValueError(f"no queue runs on {runs}; start it with: make records")
    for process in processes:
        os.kill(process, number)
    workers = f" with its {len(processes) - 1} workers" if len(processes) > 1 else ""
    print(f"the queue, process {processes[0]}, is {state}{workers}")
