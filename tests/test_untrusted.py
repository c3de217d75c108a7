"""Fuzzed input: it is used, or refused with a message, and never met with a traceback."""

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
import tempfile
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
from archives import batch, package, small_records, tar_of
from PIL import Image
from torch import nn

import orthoconv
from orthoconv.__main__ import main as run
from orthoconv.data import DataError, Split, load
from orthoconv.data import cifar as cifar10
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
