"""Members that are trained at the same time are those that are trained one after the other."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from orthoconv import models
from orthoconv.lab.cli import main
from orthoconv.lab.runs import Run
from orthoconv.lab.side_by_side import run_side_by_side

pytestmark = pytest.mark.slow
_SMALL = ["--recipe.epochs", "1", "--model.width", "0.125", "--examples", "128", "--recipe.batch_size", "32"]


def test_the_same_weights_as_one_after_the_other(tmp_path, capfd) -> None:
    for threads in (1, 2):
        out = str(tmp_path / f"{threads}")
        main(["train", "--data", "digits", *_SMALL, "--model.members", "2", "--threads", f"{threads}", "--out", out])
    one, both = (models.load(tmp_path / f"{threads}").state_dict() for threads in (1, 2))
    assert one.keys() == both.keys()
    assert all(torch.equal(one[key], both[key]) for key in one)
    assert "2 members side by side" in capfd.readouterr().out
    assert "epoch   1" in (tmp_path / "2" / "member1" / "log.txt").read_text()
    assert not (tmp_path / "1" / "member1" / "log.txt").exists()
    assert [Run(tmp_path / "2" / f"member{k}").config["hardware"]["threads"] for k in range(2)] == [1, 1]


def test_a_failure_names_its_log_and_stops_the_others(tmp_path) -> None:
    logs = [tmp_path / f"member{k}" / "log.txt" for k in range(2)]
    started = time.monotonic()
    with pytest.raises(ChildProcessError, match=r"member1 has failed; .*member1.log\.txt has what it printed"):
        run_side_by_side(_sleep_or_root, [(600.0,), (-1.0,)], logs, threads=1)
    assert time.monotonic() - started < 300
    assert "ValueError" in logs[1].read_text()


@pytest.mark.parametrize("x", [(600.0, -1.0), (-1.0, 600.0)])
def test_an_expected_error_is_raised_with_its_message(tmp_path, capfd, x: tuple[float, ...]) -> None:
    logs = [tmp_path / f"member{k}" / "log.txt" for k in range(2)]
    with pytest.raises(ValueError, match=rf"^member{x.index(-1.0)}: "):
        run_side_by_side(_sleep_or_root, [(v,) for v in x], logs, 1, expected=(OSError, ValueError))
    assert "Traceback" not in capfd.readouterr().err


def test_a_member_that_cannot_be_trained_says_why(tmp_path, capfd) -> None:
    command = ["train", "--data", "digits", *_SMALL, "--model.members", "2", "--threads", "2", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"^orthoconv: member[01]: CayleyConv2d needs finite weights"):
        main([*command, "--recipe.lr", "1e30"])
    assert "Traceback" not in capfd.readouterr().err


def _sleep_or_root(x: float) -> None:
    time.sleep(math.sqrt(x) ** 2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_processes_end_with_the_one_that_started_them(tmp_path) -> None:
    code = (
        "import time; from pathlib import Path; from orthoconv.lab.side_by_side import run_side_by_side\n"
        f"logs = [Path({str(tmp_path)!r}, f'{{k}}', 'log.txt') for k in range(2)]\n"
        "if __name__ == '__main__': run_side_by_side(time.sleep, [(600,), (600,)], logs, 1)"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, script], cwd=Path(__file__).parents[1])
    children = _until(lambda: _sleeping(parent.pid), lambda found: len(found) == 2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _until(lambda: [pid for pid in children if Path(f"/proc/{pid}").exists()], lambda left: not left)


def _sleeping(parent: int) -> list[int]:
    """Children that have started their call: processes of Python that have the thread that waits for the parent."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    spawned = [int(pid) for pid in listed if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [pid for pid in spawned if len(list(Path(f"/proc/{pid}/task").iterdir())) > 1]


def _until(find, done):
    """Ask until the answer is as wanted, for two minutes at most."""
    for _ in range(1200):
        if done(found := find()):
            return found
        time.sleep(0.1)
    raise AssertionError(f"still {found}")
