"""Commands on another device: they find it, compute on it, and write down where."""

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend import NAME, visible

from orthoconv.devices import choose_device
from orthoconv.lab.cli import COMMANDS, main
from orthoconv.lab.paper.records import read_records


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with visible():
        yield


def test_bad_devices_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_device("auto").type == NAME
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(ValueError, match=r"device must be auto, cpu, cuda, .* got 'gpu'"):
        choose_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device 'cuda:1' is not available"):
            choose_device("cuda:1")
    with pytest.raises(ValueError, match="this machine has 1 devices of type acc, but got 'acc:3'"):
        choose_device("acc:3")
    with pytest.raises(SystemExit, match="device must be auto"):
        main(["report", "runs/none", "--device", "gpu"])


def test_a_process_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="has 1 devices of type acc, but process 1 of this machine needs one"):
        choose_device("auto")


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


SMALL = ["--data", "digits", "--model.width", "0.0625", "--recipe.batch_size", "100", "--recipe.augment", "false"]


@pytest.mark.slow
def test_commands_run_on_the_device_as_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for device in ("cpu", "auto"):
        run = tmp_path / device
        place = f"{NAME}:0" if device == "auto" else "cpu"
        main(["train", "--out", str(run), "--recipe.epochs", "1", *SMALL, "--device", device])
        assert f"device: {place}" in capsys.readouterr().out
        attack = ["--attack_examples", "8", "--apgd_iterations", "3", "--device", device]
        main(["evaluate", str(run), *attack, "--record", str(tmp_path / f"{device}.jsonl")])
        assert read(run / "config.json")["hardware"]["device"] == place
        assert read(run / "evaluation.json")["hardware"]["device"] == place
        main(["verify", str(run), "--images", "20", "--attack", "4", "--device", device])
        main(["report", str(run), "--device", device])
        main(["export", str(run), "--format", "pt2", "--device", device])
        assert "largest difference to the model" in capsys.readouterr().out
        rows[device] = read(run / "evaluation.json"), json.loads((tmp_path / f"{device}.jsonl").read_text())
    (near, one), (far, two) = rows["cpu"], rows["auto"]
    assert one["hash"] == two["hash"], "where a run was computed does not enter its digest"
    assert far["clean"] == pytest.approx(near["clean"], abs=0.01)
    assert far["lipschitz_bound"] == pytest.approx(near["lipschitz_bound"], rel=1e-5)


@pytest.mark.slow
def test_other_commands_run_on_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--device", NAME]
    main(["bench", "layers", "--panels", "[a]", "--methods", "[plain,cayley]", "--rounds", "1", "--batch", "2",
          "--out", str(tmp_path / "b"), *out])  # fmt: skip
    assert read(tmp_path / "b" / "layers.json")["hardware"]["device"] == f"{NAME}:0"
    main(["wasserstein", "--data", "digits32", "--other", "shift", "--width", "0.0625", "--steps", "2", "--rates",
          "[0.01]", "--examples", "100", "--runs", str(tmp_path / "w"), *out])  # fmt: skip
    main(["demo", "--out", str(tmp_path / "d"), "--epochs", "1", "--attack_examples", "4", "--apgd_iterations", "2",
          *out])  # fmt: skip
    main(["reproduce", "orthogonality", "--results", str(tmp_path / "r"), "--runs", str(tmp_path / "runs"), *out])
    main(["rates", "kwlarge_provable", "--only", "[RKO]", "--grid", "[0.01]", "--examples", "300", "--data",
          "digits32", "--results", str(tmp_path / "rates"), *out])  # fmt: skip
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert {line["hardware"]["device"] for line in lines if "hardware" in line} == {f"{NAME}:0"}
    assert capsys.readouterr().out.count(f"device: {NAME}:0") >= 5


def test_every_command_that_computes_takes_a_device() -> None:
    commands = {name: command for name, command in COMMANDS.items() if callable(command)}
    for group, parts in COMMANDS.items():
        if not callable(parts):
            commands |= {f"{group} {name}": command for name, command in parts.items() if callable(command)}
    without = {name for name, command in commands.items() if "device" not in inspect.signature(command).parameters}
    assert without == {"completion", "data", "publish", "records left", "records pause", "records resume"}


TRIALS = """
base: {data: digits, examples: 300, model: {width: 0.0625}, recipe: {epochs: 1, batch_size: 100, augment: false}}
trials: {one: {}, two: {recipe: {lr: 0.02}}}
"""


@pytest.mark.slow
def test_search_and_the_queue_run_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda _: 0)  # which would stay with the other tests
    (tmp_path / "trials.yaml").write_text(TRIALS)
    (tmp_path / "queue.yaml").write_text("- trials: trials.yaml\n- {experiment: orthogonality, budget: smoke}\n")
    main(["search", "--trials", "trials.yaml", "--only", "[one]", "--device", NAME])
    main(["records", "run", "--queue", "queue.yaml", "--most", "2", "--device", NAME])
    main(["train", "--out", "runs/last", "--recipe.epochs", "1", *SMALL, "--device", "cpu"])
    main(["search", "--finalist", "runs/last", "--device", NAME])
    records = read_records(Path("results"))
    assert sorted(r["experiment"] for r in records) == ["finalist", "orthogonality", "search", "search"]
    places = [r.get("measured_on", r["hardware"]["device"]) for r in records]
    assert set(places) == {f"{NAME}:0"}
    assert capsys.readouterr().out.count(f"device: {NAME}:0") == 3
