"""What a figure was measured on: machine, versions, commit."""

__all__ = ["code_digest", "hardware", "use_device"]

import ast
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from orthoconv import __version__
from orthoconv.devices import choose_device


def use_device(name: str) -> torch.device:
    """Return the device of a command's --device, and print it, once for all processes of a run."""
    device = choose_device(name)
    if os.environ.get("RANK", "0") == "0":
        print(f"device: {device}", flush=True)
    return device


def hardware(device: torch.device) -> dict[str, Any]:
    """Describe the machine, the device that computed, the versions and the commit of this process."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "orthoconv": __version__,
        "commit": _commit(),
    }


_TIMED = (  # what decides how fast a layer is
    "autograd.py", "budget.py", "convolutions.py", "elimination.py", "fourier.py", "linalg", "nn", "planes.py",
    "products.py",
)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_digest() -> str:
    """Return a digest of the code that decides how fast layers are. Comments and docstrings do not change it.

    >>> len(code_digest())
    16
    """
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    files = [
        f for name in _TIMED for f in ([package / name] if name.endswith(".py") else (package / name).glob("*.py"))
    ]
    for file in sorted(files):
        digest.update(f"{file.relative_to(package).as_posix()}\n{_statements(file.read_text())}\n".encode())
    return digest.hexdigest()[:16]


def _statements(source: str) -> str:
    """Return the source without docstrings, blank lines, and lines that are comments."""
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            dropped |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), start=1)
    return "\n".join(line for k, line in lines if k not in dropped and line.strip() and line.lstrip()[0] != "#")


def _commit() -> str | None:
    """Return the commit of the checkout that this file is in, if it is in one, with + if the package has been changed.

    Other files do not count: a queue that appends its records would change the state that the next one names.
    """
    package = Path(__file__).parents[1]
    try:
        commit, changed = (
            subprocess.run(["git", *args], cwd=package, capture_output=True, text=True, timeout=10)
            for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno", "--", "."])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "") if commit.returncode == 0 else None
