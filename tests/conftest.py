import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from archives import small_records

from orthoconv.data import DataError
from orthoconv.data import cifar as cifar10
from orthoconv.data import stl as stl10

torch.set_num_threads(1)  # the tests are small: more threads wait for each other longer than they work
CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # torch.manual_seed formats the call stack for each of them: 2 ms inside pytest
        device.manual_seed_all = lambda seed: None


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting modules and tests again and again: they live until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seed each test, and keep commands from changing the process of the tests.

    `orthoconv bench` would tie both workers to one core; `orthoconv records run` would lower their priority for good.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if CORES is not None and os.sched_getaffinity(0) != CORES:
        os.sched_setaffinity(0, CORES)


@pytest.fixture(scope="session", autouse=True)
def _one_onnx_registry() -> Iterator[None]:
    """Keep the table of operators that each `torch.onnx.export` makes anew from 500 functions, in two seconds."""
    export = torch.onnx.export

    def export_by_one_table(*args: Any, **options: Any) -> Any:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        if not isinstance(ONNXRegistry.from_torchlib, functools._lru_cache_wrapper):
            ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
        return export(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", export_by_one_table)
        yield


@pytest.fixture(scope="session", autouse=True)
def _small_galleries() -> Iterator[None]:
    """Attack the images of a report at 6 norms rather than 24, from the same smallest one to nearly the largest."""
    from orthoconv.lab import evaluation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "_TRIES", evaluation._TRIES[::4])
        yield


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


@pytest.fixture
def offline(tmp_path, monkeypatch) -> None:
    """No network, an empty cache, and sixty records in place of those of CIFAR-10."""

    def check(found: torch.Tensor) -> None:
        if not torch.equal(found, small_records()):
            raise DataError("other records")

    monkeypatch.setattr(cifar10, "_check", check)
    monkeypatch.setattr(cifar10, "_ARCHIVE", "file:///nowhere")
    monkeypatch.setattr(stl10, "_ARCHIVE", "file:///nowhere")
    monkeypatch.setattr(stl10, "_IMAGES", {"train": 1, "test": 1})
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
