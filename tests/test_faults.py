"""Faults: processes that are killed, disks that are full, files that are damaged, two writers of one file."""

import errno
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from orthoconv.data import DataError, Split
from orthoconv.data import cifar as cifar10
from orthoconv.files import bytes_of, cache_dir, sha256, write_atomically
from orthoconv.lab.cli import main
from orthoconv.lab.paper.records import append_record, read_records
from orthoconv.lab.runs import Run
from orthoconv.train import CheckpointError, Recipe, fit, load_weights, save_checkpoint, save_weights
from orthoconv.weights import read

TRAIN = [
    *("train", "--model.width", "0.125", "--recipe.batch_size", "64", "--recipe.epochs", "3", "--threads", "1"),
    *("--recipe.checkpoint_every", "2", "--examples", "320", "--out"),
]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes that have everything imported, so that their time is that of their work."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "orthoconv.lab.cli", "torch._dynamo"])  # which optimizers import
    first = context.Process(target=abs, args=(0,))
    first.start()
    first.join()
    return context


def command(args: list[str], log: Path, largest: int | None = None) -> None:
    """In a process of its own: the command line, with its output in a file, and no file larger than `largest`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    main(args)


def started(processes: ForkServerContext, folder: Path, *more: str, largest: int | None = None) -> BaseProcess:
    args = [*TRAIN, str(folder), *more]
    process = processes.Process(target=command, args=(args, folder.with_suffix(".log"), largest))
    process.start()
    return process


def finished(processes: ForkServerContext, folder: Path, *more: str, largest: int | None = None) -> tuple[int, str]:
    """Exit code and output of a whole run."""
    process = started(processes, folder, *more, largest=largest)
    process.join(300)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode, folder.with_suffix(".log").read_text()


def outcome(folder: Path) -> dict[str, Any]:
    """What a run leaves, to the bit: digests of its tensors, and the lines of its metrics but for their times."""
    run = Run(folder)
    files = (run.weights_path, run.checkpoint_path, run.initial_path)
    lines = [json.dumps({k: v for k, v in m.items() if not k.endswith("seconds")}) for m in run.metrics()]
    return {"metrics": lines, **{path.name: sha256(read(path)[0]) for path in files}}


def spent(process: BaseProcess, begin: float) -> float:
    """Seconds of the processor that it has had, whatever else runs here; without /proc, those since `begin`."""
    try:
        text = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return 0.0 if Path("/proc/self/stat").exists() else time.perf_counter() - begin
    return sum(map(int, text.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


class Whole(NamedTuple):
    folder: Path
    outcome: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def whole(processes, tmp_path_factory) -> Whole:
    """A run that nothing happened to."""
    folder, seconds = tmp_path_factory.mktemp("whole") / "run", 0.0
    process, begin = started(processes, folder), time.perf_counter()
    while process.is_alive():
        seconds = max(seconds, spent(process, begin))
        process.join(0.005)
    assert process.exitcode == 0, folder.with_suffix(".log").read_text()
    found = outcome(folder)
    assert len(found["metrics"]) == 3
    return Whole(folder, found, seconds)


# Kills


def kill(processes: ForkServerContext, folder: Path, moment: float, *more: str) -> bool:
    """kill -9 after so many seconds of work; whether it was still running."""
    process, begin = started(processes, folder, *more), time.perf_counter()
    while process.is_alive() and spent(process, begin) + 0.01 < moment:  # which is counted in hundredths
        process.join(0.005)
    process.join(moment % 0.01)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def place(folder: Path) -> str:
    """Where a killed run had come to, and whether it was writing a file."""
    parts = [p.name for p in folder.glob(".*")] if folder.exists() else []
    checkpoint = Run(folder).checkpoint_path
    step = f"after step {load_weights(checkpoint, None)['done']}" if checkpoint.exists() else "before any checkpoint"
    return step + (", in a write" if parts else "")


def kill_and_resume(processes, whole, folder: Path, kills: int) -> Counter[str]:
    """Kill so many runs at moments spread over the duration of one; all that are resumed end as the whole one did."""
    source, places = random.Random(0), Counter[str]()
    for k in range(kills):
        path, moment = folder / str(k), whole.seconds * (k + source.random()) / kills
        while not kill(processes, path, moment):  # it was faster than the first one
            shutil.rmtree(path)
            moment *= source.uniform(0.5, 1)
        places[place(path)] += 1
        code, text = finished(processes, path, "--resume", "true")
        assert code == 0, text
        assert outcome(path) == whole.outcome, f"killed after {moment:.3f} s, {place(path)}"
        names = {p.name for p in path.iterdir() if not p.name.startswith(".")}
        assert names == {
            "config.json",
            "metrics.jsonl",
            *(f"{k}.safetensors" for k in ("checkpoint", "initial", "model")),
        }
        shutil.rmtree(path)
    return places


@pytest.mark.slow
def test_killed_runs_end_as_if_they_had_not_been(processes, whole, tmp_path) -> None:
    assert kill_and_resume(processes, whole, tmp_path, 1).total() == 1


@pytest.mark.long
def test_fifty_kills(processes, whole, tmp_path) -> None:
    places = kill_and_resume(processes, whole, tmp_path, 50)
    print(f"\nkill -9: {places.total()} runs of {whole.seconds:.2f} s of work killed, resumed, bit-identical; where:")
    for name, count in sorted(places.items()):
        print(f"  {count:3d} {name}")
    assert len(places) > 5, "the kills were not spread over the run"
    code, text = finished(processes, tmp_path / "other", "--recipe.seed", "1")
    assert code == 0, text
    assert all(outcome(tmp_path / "other")[k] != v for k, v in whole.outcome.items()), "the negative control"


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again(processes, whole, tmp_path) -> None:
    """Each time a little later, until it is done first."""
    kills = 0
    while kill(processes, tmp_path / "run", 0.05 * (kills + 1) * whole.seconds, "--resume", "true"):
        kills += 1
        assert kills < 100, "it makes no progress"
    assert kills > 0
    assert outcome(tmp_path / "run") == whole.outcome
    print(f"\nkill -9: one run, killed {kills} times before its end, bit-identical")


def test_a_run_goes_on_only_as_what_it_is(whole, tmp_path, capsys) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    for args, message in (
        ([], "has a run already"),
        (["--resume", "true", "--model.lipschitz", "0.5"], "is a run with model"),
        (["--resume", "true", "--recipe.lr", "0.5"], "is of a run with lr=0.01, not 0.5"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*TRAIN, str(tmp_path / "run"), *args])
    main([*TRAIN, str(tmp_path / "run"), "--resume", "true"])
    assert outcome(tmp_path / "run") == whole.outcome


def test_what_killed_writers_left_is_removed(tmp_path) -> None:
    old, new, other = (tmp_path / name for name in (".file.0123456789abcdef", ".file.fedcba9876543210", ".file.swp"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (time.time() - 4000,) * 2)
    write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".file.fedcba9876543210", ".file.swp", "file"]


def test_files_are_for_those_whom_the_umask_allows(tmp_path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", lambda file: file.write(b"new"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


# Full disks


def full_at(monkeypatch, nth: int) -> list[int]:
    """Let the nth file that is written find the disk full; the number of files so far is counted in the list."""
    count, sync = [0], os.fsync

    def fsync(handle: int) -> None:
        count[0] += 1
        if count[0] == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return count


def disk_full(folder: Path, monkeypatch, nth: int, expected: dict[str, Any]) -> None:
    full_at(monkeypatch, nth)
    with pytest.raises(SystemExit, match=rf"{folder}/\w+\.\w+.*") as stop:
        main([*TRAIN, str(folder)])
    assert "No space left on device" in str(stop.value.code)
    assert not list(folder.glob(".*")), "half a file is left"
    main([*TRAIN, str(folder), "--resume", "true"])
    assert outcome(folder) == expected


def test_a_disk_that_is_full_for_a_moment(whole, tmp_path, monkeypatch, capsys) -> None:
    disk_full(tmp_path / "run", monkeypatch, 6, whole.outcome)  # the figures of the first epoch


@pytest.mark.long
def test_a_disk_that_is_full_at_any_write_of_a_run(whole, tmp_path, monkeypatch, capsys) -> None:
    count = full_at(monkeypatch, 0)
    main([*TRAIN, str(tmp_path / "run")])
    writes = count[0]
    assert writes >= 12
    for nth in range(1, writes + 1):
        with monkeypatch.context() as patch:
            disk_full(tmp_path / str(nth), patch, nth, whole.outcome)
    capsys.readouterr()
    with capsys.disabled():
        print(f"\ndisk full: at each of the {writes} writes of a run; all resumed, bit-identical")


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(processes, whole, tmp_path) -> None:
    """The system itself refuses to write: the weights fit, the checkpoint does not."""
    code, text = finished(processes, tmp_path / "run", largest=300_000)
    assert code == 1
    assert f"{tmp_path / 'run' / 'checkpoint.safetensors'} could not be written: File too large" in text
    assert "Traceback" not in text
    assert not list((tmp_path / "run").glob(".*"))
    code, text = finished(processes, tmp_path / "run", "--resume", "true", largest=10_000_000)
    assert code == 0, text
    assert outcome(tmp_path / "run") == whole.outcome


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Gives a file system of some size, and changes it; needs the right to mount one."""
    folder, mounted = tmp_path / "disk", False
    folder.mkdir()

    def mount(size: str) -> Path:
        nonlocal mounted
        options = f"{'remount,' if mounted else ''}size={size}"
        tool = shutil.which("mount")
        run = tool and subprocess.run([tool, "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
        if not run or run.returncode:
            pytest.skip("a file system cannot be mounted here")
        mounted = True
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.long
def test_a_disk_that_is_really_full(processes, whole, small_disk) -> None:
    """It has room for the weights and one checkpoint, not for the second one, which is written beside the first."""
    folder = small_disk("900k") / "run"
    code, text = finished(processes, folder)
    assert code == 1, text
    assert "No space left on device; what was there before is unchanged" in text
    assert "Traceback" not in text
    assert load_weights(Run(folder).checkpoint_path, None)["done"] == 2
    small_disk("8m")
    code, text = finished(processes, folder, "--resume", "true")
    assert code == 0, text
    assert outcome(folder) == whole.outcome
    print("\ndisk full: a tmpfs of 900 kB; refused with the path, the first checkpoint kept, resumed, bit-identical")


def test_records_on_a_full_disk(processes, tmp_path) -> None:
    path = tmp_path / "results.jsonl"
    append_record(path, {"a": 1})
    process = processes.Process(target=append_on_small_disk, args=(path, tmp_path / "log"))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    assert f"File too large: '{path}'" in (tmp_path / "log").read_text()
    append_record(path, {"c": 3})
    assert read_records(tmp_path) == [{"a": 1}, {"c": 3}]


def append_on_small_disk(path: Path, log: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        append_record(path, {"b": "x" * 5000})
    except OSError as error:
        log.write_text(str(error))
        sys.exit(1)


# One cache, many processes


def records() -> torch.Tensor:
    """Sixty in the format of CIFAR-10."""
    return torch.randint(256, (60, 3073), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def same_records(found: torch.Tensor) -> None:
    """In place of the check for those of CIFAR-10."""
    if (digest := hashlib.sha256(bytes_of(found)).hexdigest()) != hashlib.sha256(bytes_of(records())).hexdigest():
        raise DataError(f"the images have the SHA-256 {digest}")


def fill(cache: Path, barrier: Any, writing: Any, forever: Any) -> None:
    """In a process of its own: find no cache, wait until all have found none, and fill it."""
    os.environ["ORTHOCONV_CACHE"] = str(cache)
    cifar10._check = same_records

    def download(progress: object) -> torch.Tensor:
        barrier.wait(60)
        return records()

    cifar10._from_download = download
    if writing is not None:  # the one that is to be killed: it says when it is at it, and then waits
        os.fsync = lambda handle: (writing.set(), forever.wait())  # type: ignore[assignment, return-value]
    cifar10.cifar10_records()


def test_processes_that_fill_one_cache_at_once(processes, tmp_path, monkeypatch) -> None:
    """Four do, and a fifth is killed while it does; the cache is whole, and read without another download."""
    barrier, writing, forever = processes.Barrier(5), processes.Event(), processes.Event()
    good = [processes.Process(target=fill, args=(tmp_path, barrier, None, None)) for _ in range(4)]
    killed = processes.Process(target=fill, args=(tmp_path, barrier, writing, forever))
    for process in (*good, killed):
        process.start()
    assert writing.wait(60)
    for process in good:
        process.join(60)
    killed.kill()
    killed.join()
    assert [p.exitcode for p in (*good, killed)] == [0, 0, 0, 0, -signal.SIGKILL]
    assert (tmp_path / "cifar10.bin").read_bytes() == bytes_of(records())
    assert len(list(tmp_path.glob(".cifar10.bin.*"))) == 1, "what the killed one left"
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(cifar10, "_check", same_records)
    monkeypatch.setattr(cifar10, "_from_download", None)
    monkeypatch.setenv("PATH", "")
    assert torch.equal(cifar10.cifar10_records(), records())


# Damaged files


def flips(data: bytes, every: int) -> Iterator[bytes]:
    """The data with one bit flipped: the first, and each one that is `every` bits further."""
    for bit in range(0, 8 * len(data), every):
        yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def cuts(data: bytes, every: int) -> Iterator[bytes]:
    return (data[:k] for k in range(0, len(data), every))


def refusals(path: Path, damaged: Iterator[bytes], use: Callable[[], object], error: type[Exception]) -> int:
    """How many damaged contents of a file were refused with its path; each of them must be."""
    count = 0
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(error, match=str(path)):
            use()
        count += 1
    return count


def damage(folder: Path, every: int) -> dict[str, int]:
    """Both kinds of file, with bits flipped and the end cut off, are refused with their path; whole, they are not.

    In a checkpoint, which is larger, only each fifth of those bits and ends.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    data = Split(torch.rand(8, 1, 2, 2), torch.arange(8) % 3)
    counts: dict[str, int] = {}
    for name, step in (("weights", every), ("checkpoint", 5 * every)):
        path, recipe = folder / f"{name}.safetensors", Recipe(epochs=1, batch_size=4, augment=False)
        if name == "weights":
            save_weights(path, model, {"a": 1.5, "b": "c"})
            use: Callable[[], object] = partial(load_weights, path, model)
        else:
            list(fit(model, data, recipe, path))
            use = partial(lambda *args: list(fit(*args, resume=True)), model, data, recipe, path)
        use()
        whole = path.read_bytes()
        counts[f"{name}: bits flipped"] = refusals(path, flips(whole, step), use, CheckpointError)
        counts[f"{name}: cut off"] = refusals(path, cuts(whole, step), use, CheckpointError)
        path.write_bytes(whole)
        use()
    return counts


def test_damaged_weights_and_checkpoints_are_refused(tmp_path) -> None:
    assert min(damage(tmp_path, 41).values()) > 10


@pytest.mark.long
def test_every_bit_of_weights_and_each_fifth_of_a_checkpoint(tmp_path) -> None:
    for name, count in damage(tmp_path, 1).items():
        print(f"\n{name}: {count} files, all refused with their path", end="")
    print()


def test_weights_without_a_digest_of_their_header_can_be_read(tmp_path) -> None:
    """Those of version 0.1.0, such as the ones that ship with the package."""
    from safetensors.torch import save

    tensors = {"model.weight": torch.rand(3, 2), "model.bias": torch.rand(3)}
    header = json.dumps({"state": {"a": 1}, "sha256": sha256(tensors)})
    path = tmp_path / "old.safetensors"
    path.write_bytes(save(tensors, {"orthoconv": header}))
    model = nn.Linear(2, 3)
    assert load_weights(path, model) == {"a": 1}
    assert torch.equal(model.weight, tensors["model.weight"])
    path.write_bytes(save(tensors, {"orthoconv": header, "sha257": "0"}))
    with pytest.raises(CheckpointError, match="its header does not have the digest"):
        load_weights(path, model)


def test_weights_are_not_a_checkpoint(tmp_path) -> None:
    model, path = nn.Linear(4, 3), tmp_path / "c"
    optimizer = torch.optim.Adam(model.parameters())
    recipe = Recipe(batch_size=4, augment=False, lipschitz=1.0)
    save_weights(path, model, {"done": 1, "sums": [0.0] * 3, "recipe": asdict(recipe)})
    split = (torch.rand(8, 4), torch.zeros(8, dtype=torch.long))
    with pytest.raises(CheckpointError, match=f"{path} has weights, but not all that a run needs .*: 'groups'"):
        list(fit(model, Split(*split), recipe, path, resume=True))
    save_checkpoint(path, model, optimizer, {"done": "some"})
    with pytest.raises(CheckpointError, match=f"{path} does not say how far its run had come: done='some'"):
        list(fit(model, Split(*split), recipe, path, resume=True))


def test_a_damaged_cache_is_refused_if_it_cannot_be_filled_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cifar10, "_ARCHIVE", "file:///nowhere")
    monkeypatch.setattr(cifar10, "_check", same_records)
    path, whole = tmp_path / "cifar10.bin", bytes(bytes_of(records()))
    path.write_bytes(whole)
    assert torch.equal(cifar10.cifar10_records(), records())
    count = refusals(path, flips(whole, 70_001), cifar10.cifar10_records, DataError)
    count += refusals(path, cuts(whole, 9_001), cifar10.cifar10_records, DataError)
    assert count == 22 + 21


@pytest.mark.long
@pytest.mark.skipif(not (cache_dir() / "cifar10.bin").exists(), reason="needs CIFAR-10 in the cache")
def test_a_damaged_cache_of_the_real_cifar10(tmp_path, monkeypatch) -> None:
    path = tmp_path / "cifar10.bin"
    shutil.copy(cache_dir() / "cifar10.bin", path)
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cifar10, "_ARCHIVE", "file:///nowhere")
    assert cifar10.cifar10_records().shape == (60_000, 3073)
    with path.open("r+b") as file:
        file.seek(100_000_001)
        (byte,) = file.read(1)
        file.seek(100_000_001)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataError, match=rf"{path}: the images have the SHA-256"):
        cifar10.cifar10_records()
    os.truncate(path, 3073 * 59_999)
    with pytest.raises(DataError, match=rf"{path}: expected 60000 records"):
        cifar10.cifar10_records()


def test_damaged_files_of_a_run(whole, tmp_path, capsys) -> None:
    """Those that the command line reads, each refused with its path; whole, the run goes on."""
    folder = Path(shutil.copytree(whole.folder, tmp_path / "run"))
    for name in ("config.json", "metrics.jsonl", "checkpoint.safetensors"):
        path = folder / name
        data = path.read_bytes()
        for damaged in (b"{" + data[40:], b"\xff" + data[1:], b"[1]\n" + data, b"[" * 100_000 + b"\n"):
            path.write_bytes(damaged)
            with pytest.raises(SystemExit, match=str(path)):
                main([*TRAIN, str(folder), "--resume", "true"])
        path.write_bytes(data)
    torn = folder / "metrics.jsonl"
    torn.write_bytes(torn.read_bytes() + b'{"certified": {"a": 1}')
    main([*TRAIN, str(folder), "--resume", "true"])
    assert outcome(folder) == whole.outcome


def test_weights_are_read_while_they_are_replaced(tmp_path) -> None:
    """Each read is of one file or of the other, though they have other sizes."""
    path, done = tmp_path / "model.safetensors", threading.Event()
    small, large = nn.Linear(2, 2), nn.Linear(200, 300)
    save_weights(path, small, {"n": 0})

    def replace_forever() -> None:
        while not done.is_set():
            for model in (large, small):
                save_weights(path, model, {"n": 0})

    writer = threading.Thread(target=replace_forever)
    writer.start()
    try:
        for _ in range(1000):
            load_weights(path, None)
    finally:
        done.set()
        writer.join()
