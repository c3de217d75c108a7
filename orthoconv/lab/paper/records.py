"""Records of real runs: files of JSON lines that are only appended to."""

__all__ = ["Record", "append_record", "metrics_of", "read_records", "run_record"]

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from orthoconv.files import read_json
from orthoconv.lab.runs import Run

Record = dict[str, Any]


def read_records(folder: Path) -> list[Record]:
    """Read all records of a folder, file by file, each in the order in which they were appended."""
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text()
        for k, line in enumerate(text[: _complete(text)].splitlines(), 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {k} is not a record: {error}") from error
    return records


def append_record(path: Path, record: Record) -> None:
    """Append a line to a file of records; a full disk, or a process killed meanwhile, leaves the lines that were there.

    Processes that append at once take turns. Half a line that a killed process left is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:  # a buffer would be written once more when the file is closed
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read().decode()
        text = text[: _complete(text)]
        size = len(text.encode())
        os.truncate(path, size)
        newline = "" if text.endswith("\n") or not text else "\n"
        line = f"{newline}{json.dumps(record)}\n".encode()
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError as error:
            os.truncate(path, size)  # half a line would spoil the next one, too
            error.filename = error.filename or str(path)
            raise


def _complete(text: str) -> int:
    """Return the length of the text without a last line that is cut short."""
    start = text.rfind("\n") + 1
    try:
        json.loads(text[start:] or "{}")
    except ValueError:
        return start
    return len(text)


def run_record(run: Run) -> Record:
    """Return the record of a run that was trained and evaluated."""
    config, metrics = run.config, run.metrics()
    return {
        "hardware": config.pop("hardware"),
        "config": config,
        "hash": run.training.hash,
        "seed": run.training.recipe.seed,
        "seconds": sum(m.get("seconds", 0) for m in metrics),
        "cpu_seconds": sum(m.get("cpu_seconds", 0) for m in metrics),
        "epochs": metrics,
        "evaluation": read_json(run.evaluation_path),
    }


def metrics_of(record: Record) -> Record:
    """Return the figures of a record, by name, or by column and name."""
    if "metrics" in record:
        metrics: Record = record["metrics"]
        return metrics
    e = record["evaluation"]
    percent = {k: 100 * e[k] for k in ("clean", "pgd", "apgd_ce", "apgd_dlr", "autoattack")}
    percent["certified"] = 100 * e["certified_at_eps"]
    return {**percent, "empirical_lipschitz": e["empirical_lipschitz"], "lipschitz_bound": e["lipschitz_bound"]}
