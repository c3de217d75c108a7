"""Locks of run folders: who holds one, what a killed process leaves, and what is cleaned up."""

import os
import re

import pytest
from locking import held

from orthoconv.lab.cli import main
from orthoconv.lab.locks import LockedError, holder, locked


def test_a_lock_names_who_holds_it(tmp_path) -> None:
    with locked(tmp_path / "run"):
        assert holder(tmp_path / "run") == os.getpid()
        with (
            pytest.raises(LockedError, match=rf"in use by process {os.getpid()} on .*; wait for it"),
            locked(tmp_path / "run"),
        ):
            raise AssertionError("two at once")
    assert holder(tmp_path / "run") is None
    assert not (tmp_path / "run").exists()
    with locked(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path) -> None:
    with held(tmp_path) as process:
        with pytest.raises(LockedError, match=rf"process {process.pid} on "), locked(tmp_path):
            raise AssertionError("two at once")
        with pytest.raises(SystemExit, match=re.escape(f"{tmp_path} is in use by process {process.pid}")):
            main(["train", "--out", str(tmp_path)])
    assert (tmp_path / "lock").exists()
    with locked(tmp_path):
        assert holder(tmp_path) == os.getpid()


def test_a_lock_leaves_no_empty_folder_behind(tmp_path) -> None:
    with pytest.raises(SystemExit, match="/nowhere: no such folder"):
        main(["train", "--data", "cifar10", "--data_dir", "/nowhere", "--out", str(tmp_path / "runs" / "new")])
    assert list((tmp_path / "runs").iterdir()) == []
    with locked(tmp_path / "runs" / "used"):
        (tmp_path / "runs" / "used" / "model").touch()
    with locked(tmp_path / "runs"):
        pass
    assert [p.name for p in tmp_path.rglob("*")] == ["runs", "used", "model"]
