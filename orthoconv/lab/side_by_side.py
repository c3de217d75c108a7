"""Functions that run side by side, each in a process of its own with its share of the threads."""

__all__ = ["run_side_by_side", "set_up_child"]

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from orthoconv.allocator import keep_freed_memory
from orthoconv.lab.configs import load_methods


def run_side_by_side(
    function: Callable[..., object],
    arguments: Sequence[tuple[Any, ...]],
    logs: Sequence[Path],
    threads: int,
    expected: tuple[type[Exception], ...] = (),
) -> None:
    """Call a function once for each tuple of arguments, all at the same time.

    What the first call prints is shown; what the others print goes to their logs. If one call fails, the others are
    stopped. If this process ends, so do they.

    Arguments:
        function: Function of a module, so that another process can import it.
        arguments: Arguments of each call.
        logs: Files for what the calls print; that of the first stays empty.
        threads: Threads of each process.
        expected: Errors that a user can mend, which need no traceback; each takes a message. If a call raises one, it
            is raised here, as the first of these types that fits.

    Raises:
        ChildProcessError: If a call fails otherwise; it names the log, which has the traceback.
    """
    context = multiprocessing.get_context("spawn")
    outputs = [None, *logs[1:]]
    pipes = [context.Pipe(duplex=False) for _ in logs]
    calls = [
        (function, args, threads, log, expected, sender)
        for args, log, (_, sender) in zip(arguments, outputs, pipes, strict=True)
    ]
    processes = [context.Process(target=_call, args=call, daemon=True) for call in calls]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # so that the other end sees the end of the process
    try:
        while any(codes := [process.exitcode for process in processes]) or None in codes:
            if failed := [k for k, code in enumerate(codes) if code]:
                raise _error(logs[failed[0]], pipes[failed[0]][0], shown=failed[0] == 0)
            wait([process.sentinel for process, code in zip(processes, codes, strict=True) if code is None])
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _error(log: Path, receiver: Connection, *, shown: bool) -> Exception:
    """Return the error of a call that has failed; `shown` says whether its output went to the terminal."""
    name = log.parent.name
    try:
        kind, message = receiver.recv()
    except EOFError:  # it is not an expected one
        return ChildProcessError(f"{name} has failed" + ("" if shown else f"; {log} has what it printed"))
    error: Exception = kind(f"{name}: {message}")
    return error


def _call(
    function: Callable[..., object], args: tuple[Any, ...], threads: int, log: Path | None,
    expected: tuple[type[Exception], ...], sender: Connection,
) -> None:  # fmt: skip
    """Call the function in this process, which the parent has started for it."""
    set_up_child(threads)
    with contextlib.ExitStack() as outputs:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = outputs.enter_context(log.open("a"))
            outputs.enter_context(contextlib.redirect_stdout(file))
            outputs.enter_context(contextlib.redirect_stderr(file))
        try:
            load_methods()
            function(*args)
        except Exception as error:  # multiprocessing would print it to the terminal
            known = [kind for kind in expected if isinstance(error, kind)]
            if known:
                sender.send((known[0], str(error)))
            if log is not None or not known:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def set_up_child(threads: int) -> None:
    """Prepare a process that another one has started. It keeps freed memory, and ends with its parent.

    Arguments:
        threads: Threads of this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
