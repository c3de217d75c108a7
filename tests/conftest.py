import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

torch.set_num_threads(1)  # the tests are small: more threads wait for each other longer than they work
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Seed each test, and undo what `orthoconv bench` does to its process: it would tie both workers to one core."""
    torch.manual_seed(0)
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if CORES is not None and os.sched_getaffinity(0) != CORES:
        os.sched_setaffinity(0, CORES)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Import a script that is in no package, given its path in the repository, such as "docs/figures.py"."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / name
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
