"""docs/certified.md: the ladder is made of records, and no figure of it is typed by hand."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "certified.md").read_text()


@pytest.fixture(scope="module")
def ladder(load_script):
    return load_script("docs/certified.py")


def test_the_ladder_is_that_of_the_records(ladder) -> None:
    assert ladder.table() in PAGE, "run `python docs/certified.py`"
    assert ladder.renewed(PAGE) == PAGE
    assert ladder.renewed(PAGE.replace("| 36/255 |", "| 35/255 |", 1)) == PAGE


def test_a_rung_without_a_record_is_refused(ladder) -> None:
    with pytest.raises(ValueError, match="0 records with the hash 'none', not 1"):
        ladder.read_rung({"change": "", "records": "finalists.jsonl", "hash": "none"})


def test_trials_on_the_page_are_those_of_the_records() -> None:
    records = [json.loads(line) for line in (ROOT / "results" / "exploration.jsonl").read_text().splitlines()]
    searched = [json.loads(line) for line in (ROOT / "results" / "search.jsonl").read_text().splitlines()]
    muon = [r["metrics"] for r in searched if r["config"]["recipe"].get("optimizer") == "muon"]
    shown = [r["metrics"] for r in records if r["finished"]] + muon
    assert (len(shown), len(muon)) == (13, 3)
    for metrics in shown:
        keys = ("clean", "certified_36", "certified_72", "certified_108")
        assert " | ".join(f"{metrics[key]:.1f}" for key in keys) in PAGE


def test_operations_are_counted_as_products_of_matrices(ladder) -> None:
    """A square convolution: complex products with each image, forward and twice backward, inverses, and taps."""
    words, f = ["downsample 4", "conv 48 k4", "flatten", "head"], 34
    convolution = f * (24 * 10 * 48 * 48 + 8 * 48**3 + 16 * 32 * 48 * 48)
    assert ladder.operations(words, 10) == pytest.approx(convolution + 6 * 10 * 48 * 64 * 10)
