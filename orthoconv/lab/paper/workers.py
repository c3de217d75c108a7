"""Work on the queue of records: in this process, or in several at once."""

__all__ = ["Desk", "work", "work_together", "working_processes"]

import multiprocessing
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch

from orthoconv.lab.configs import load_methods
from orthoconv.lab.evaluation import BrokenCertificateError
from orthoconv.lab.locks import LockedError, holder, locked
from orthoconv.lab.machine import use_device
from orthoconv.lab.paper.queue import Job, left_text, load_queue, missing_jobs, render_tables
from orthoconv.lab.paper.records import Record, read_records
from orthoconv.lab.side_by_side import set_up_child
from orthoconv.train import CheckpointError, TrainingError


class Desk(NamedTuple):
    """Where a queue is worked on.

    Attributes:
        queue: File with the order of the runs; None for that of the package.
        results: Folder to which records and tables are written.
        runs: Folder for the runs themselves.
        data_dir: Folder of the data set; None for its usual place.
        device: Device that computes.
    """

    queue: Path | None
    results: Path
    runs: Path
    data_dir: Path | None
    device: str

    def missing(self, records: list[Record]) -> list[Job]:
        """Return the runs that are not among these records, in order."""
        return missing_jobs(load_queue(self.queue), self.results, self.runs, self.data_dir, records)


def work(desk: Desk, most: int = 0) -> list[str]:
    """Run what has no record, one run after another. Return the names of the runs that could not be made.

    Arguments:
        desk: Where to work.
        most: Number of runs after which to stop; 0 for all.
    """
    entries, done, device = load_queue(desk.queue), 0, use_device(desk.device)
    failed: dict[str, str] = {}
    render_tables(entries, desk.results)  # the last queue may have been killed before it did
    while not most or done < most:
        records = read_records(desk.results)
        jobs = [job for job in desk.missing(records) if job.key not in failed]
        print(left_text(jobs, records), flush=True)
        if not jobs:
            break
        try:
            jobs[0].run(device)
            done += 1
        except (BrokenCertificateError, CheckpointError, LockedError, TrainingError) as error:
            failed[jobs[0].key] = jobs[0].name
            print(f"{jobs[0].name}: {error}; the queue goes on without it", flush=True)
        render_tables([entry for entry in entries if entry.get("experiment") == jobs[0].experiment], desk.results)
    return list(failed.values())


def work_together(desk: Desk, workers: int, most: int = 0) -> list[str]:
    """Share the queue among processes, each with its part of the threads. Return the names of the runs left.

    Each worker takes the first run that no other works on. They end with this process, however it ends.

    Arguments:
        desk: Where to work.
        workers: Number of processes.
        most: Number of runs after which each of them stops; 0 for all.
    """
    context, threads = multiprocessing.get_context("spawn"), max(1, torch.get_num_threads() // workers)
    folders = [_folder(desk.runs, k) for k in range(1, workers + 1)]
    processes = [context.Process(target=_worker, args=(desk, most, f, threads), daemon=True) for f in folders]
    for process, folder in zip(processes, folders, strict=True):
        print(f"a worker with {threads} thread{'s'[: threads > 1]} writes to {_log(folder)}", flush=True)
        process.start()
    for process in processes:
        process.join()
    if broken := [str(_log(f)) for p, f in zip(processes, folders, strict=True) if p.exitcode]:
        raise RuntimeError(f"a worker ended early; see the end of {', '.join(broken)}")
    render_tables(load_queue(desk.queue), desk.results)  # of two that render at once, the later may know less
    records = read_records(desk.results)
    jobs = desk.missing(records)
    print(left_text(jobs, records), flush=True)
    return [] if most else [job.name for job in jobs]


def _worker(desk: Desk, most: int, folder: Path, threads: int) -> None:
    set_up_child(threads)
    with locked(folder), _log(folder).open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        load_methods()
        work(desk, most)


def _folder(runs: Path, k: int) -> Path:
    """Folder that worker k locks."""
    return runs / "queue" / f"worker{k}"


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def working_processes(runs: Path) -> list[int]:
    """Return the processes that work on the queue of a folder of runs, the one that was started first.

    Arguments:
        runs: Folder of the runs.
    """
    queue = runs / "queue"
    found = [holder(folder) for folder in (queue, *sorted(queue.glob("worker*/")))]
    return [process for process in found if process is not None]
