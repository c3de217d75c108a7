"""docs/conversion.md: the table of real models is made of records, and no figure of it is typed by hand."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from orthoconv.lab.machine import hardware
from orthoconv.nn import methods

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "conversion.md").read_text()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark; the method that it registers is gone after the test."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    for name in ("conversions", "real_models", "standins"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import conversions

    return conversions


AT_CHANCE = ("nin_cifar10",)  # the page names it, and says why


def test_the_table_is_that_of_the_records(script: ModuleType) -> None:
    records = script.read(script.RECORDS)
    assert script.renewed(PAGE, records) == PAGE, "run `python benchmarks/conversions.py --table`"
    assert script.renewed(PAGE.replace("| timm |", "| tim |"), records) == PAGE


def test_the_records_keep_the_promises_of_convert(script: ModuleType) -> None:
    best = script.best(script.read(script.RECORDS))
    assert len(best) >= 60
    assert all(f"{name} " in PAGE for name in AT_CHANCE)
    for r in best:
        assert "failed" not in r, r
        if "refused" not in r:
            assert r["without_gradient"] == 0, r
            assert max(r.get("bound", 0), r.get("trained_bound", 0)) <= 1.0001, r
            assert (r.get("accuracy", 1) > 0.25) == (r["model"] not in AT_CHANCE), r


def test_new_records_say_what_they_were_made_with(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of before 17 November 2026 have no commit; all lines after the first with one have it, too."""
    monkeypatch.setattr(script, "models", lambda: iter([("p", "m", lambda: nn.Linear(3, 4), (3,))]))
    command = ["conversions.py", "--parts", "--records", str(tmp_path / "new.jsonl")]
    for argv, lines in ((command, 1), (command, 1), ([*command, "--again"], 2)):
        monkeypatch.setattr(sys, "argv", argv)
        script.main()
        made = script.read(tmp_path / "new.jsonl")
        assert len(made) == lines
    assert made[-1]["torch"] == torch.__version__
    assert made[-1]["commit"] == hardware(torch.device("cpu"))["commit"]
    with_commit = ["commit" in r for r in script.read(script.RECORDS)]
    assert with_commit == sorted(with_commit)


def test_a_record_that_says_more_is_kept(script: ModuleType) -> None:
    base = {"package": "p", "model": "m", "input": [3, 8, 8], "without_gradient": 0}
    trained, parts = {**base, "bound": 1.0, "signal": 0.5, "accuracy": 0.75}, {**base, "parts": True}
    assert script.best([trained, parts]) == script.best([parts, trained]) == [trained]
    assert script.best([trained, {**base, "refused": "no"}])[0]["refused"] == "no"
    assert "| p | m | 3x8x8 | 1.0000000 | 0.5 | 75 % | |" in script.table([trained])


def test_signals_are_compared_where_a_model_has_both(script: ModuleType) -> None:
    old, new = ({"package": "p", "model": "m", "signal": s} for s in (1e-5, 0.02))
    assert "| p m | 1e-05 | 0.02 |" in script.gains([old, new | {"commit": "abc"}])
    assert "| p m |" not in script.gains([old, new])
    rows = [line.split("|")[2:4] for line in script.gains(script.read(script.RECORDS)).splitlines()[2:]]
    factors = sorted(float(after) / float(before) for before, after in rows)
    assert factors[-3] > 100, "three models in which the signal was lost"
    assert factors[0] > 0.5, "none that loses what it had"


@pytest.mark.parametrize("dense", [False, True])
def test_the_toy_can_be_learned_and_not_guessed(script: ModuleType, dense: bool) -> None:
    """Each class is as frequent as any other, and a network that sees the image reaches more than chance."""
    x, labels = script.toy((1, 8, 8), dense)
    assert x.shape == (64, 1, 8, 8)
    assert labels.shape == ((64, 8, 8) if dense else (64,))
    assert len(labels.unique()) == 4
    assert len(set(labels.flatten().bincount().tolist())) == 1
    layers = (nn.Conv2d(1, 4, 1),) if dense else (nn.Flatten(), nn.Linear(64, 4))
    torch.manual_seed(0)
    assert script.toy_accuracy(nn.Sequential(*layers), (1, 8, 8), 100, float("inf")) > 0.5
    assert script.toy_accuracy(nn.Sequential(*layers), (1, 8, 8), 100, 0.0) is None


def test_stand_ins_show_that_a_network_converts(script: ModuleType) -> None:
    facts = script.examine_parts(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU()), (3, 8, 8))
    assert facts == {"parts": True, "without_gradient": 0}
    refused = script.examine_parts(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GLU(1)), (3, 8, 8))
    assert "GLU" in refused["refused"]
