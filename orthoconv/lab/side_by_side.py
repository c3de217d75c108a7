"""Functions that run side by side, each in a process of its own with its share of the threads."""

__all__ = ["run_side_by_side"]

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from orthoconv.allocator import keep_freed_memory
from orthoconv.lab.configs import load_methods


def run_side_by_side(
    function: Callable[..., object], arguments: Sequence[tuple[Any, ...]], logs: Sequence[Path], threads: int
) -> None:
    """Call a function once for each tuple of arguments, all at the same time.

    What the first call prints is shown; what the others print goes to their logs. If one call fails, the others are
    stopped. If this process ends, so do they.

    Arguments:
        function: Function of a module, so that another process can import it.
        arguments: Arguments of each call.
        logs: Files for what the calls print; that of the first stays empty.
        threads: Threads of each process.

    Raises:
        ChildProcessError: If a call fails; it names the log, which has the traceback.
    """
    context = multiprocessing.get_context("spawn")
    outputs = [None, *logs[1:]]
    calls = [(function, args, threads, log) for args, log in zip(arguments, outputs, strict=True)]
    processes = [context.Process(target=_call, args=call, daemon=True) for call in calls]
    for process in processes:
        process.start()
    try:
        while any(codes := [process.exitcode for process in processes]) or None in codes:
            if failed := [k for k, code in enumerate(codes) if code]:
                where = f"; {logs[failed[0]]} has what it printed" if failed[0] else ""
                raise ChildProcessError(f"{logs[failed[0]].parent.name} has failed{where}")
            wait([process.sentinel for process, code in zip(processes, codes, strict=True) if code is None])
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _call(function: Callable[..., object], args: tuple[Any, ...], threads: int, log: Path | None) -> None:
    """Call the function in this process, which the parent has started for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()
    load_methods()
    if log is None:
        function(*args)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            function(*args)
        except Exception:  # multiprocessing would print it to the terminal
            traceback.print_exc()
            file.flush()
            os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
