"""Figures in prose are those of the records: docs/figures.py reads the comment that stands behind each."""

import json
import re
from pathlib import Path

import pytest

from orthoconv import models
from orthoconv.lab.pages import render
from orthoconv.models.describing import description_of
from orthoconv.models.trained import PRETRAINED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TABLE = re.compile(
    r"end of \w+|table \w+ \w+|\w+: python benchmarks/tables.py --write"
)  # around a table that is made from records
AT_LEAST = {"docs/reproducing.md": 50, "docs/performance.md": 6, "docs/training.md": 14}


@pytest.fixture(scope="module")
def figures(load_script):
    return load_script("docs/figures.py")


def test_every_marked_figure_is_that_of_its_record(figures) -> None:
    wrong = {str(page.relative_to(ROOT)): figures.disagreements(page.read_text()) for page in PAGES}
    assert not any(wrong.values()), {page: lines for page, lines in wrong.items() if lines}
    for name, count in AT_LEAST.items():
        text = (ROOT / name).read_text()
        assert len(figures.marked(text)) >= count
        comments = [c for c in re.findall(r"<!-- (.*?) -->", text) if not TABLE.fullmatch(c)]
        assert len(figures.marked(text)) == len(comments), "a comment that stands behind no figure"


def test_a_figure_that_differs_is_found(figures) -> None:
    source = "kwlarge_provable a1ca69 evaluation/clean %"
    assert figures.disagreements(f"74.8 %<!-- {source} --> and 74.81<!-- {source} -->") == []
    assert figures.disagreements(f"74.9<!-- {source} -->") == [f"74.9 is 74.8 by {source!r}"]
    assert figures.corrected(f"74.9 %<!-- {source} --> of 1,074<!-- {source} -->") == (
        f"74.8 %<!-- {source} --> of 75<!-- {source} -->"
    )
    with pytest.raises(ValueError, match="has 0 records whose hash starts with 'none', not 1"):
        figures.disagreements("1.0<!-- kwlarge_provable none evaluation/clean -->")


def test_marked_tables_are_those_of_the_records(figures) -> None:
    for page in PAGES:
        text = page.read_text()
        assert figures.with_tables(text) == text, f"{page.name}: python docs/figures.py --write"
    page = "<!-- table orthogonality short -->\n\n| 1 |\n\n<!-- end of table -->"
    made = figures.with_tables(page)
    assert "| least before |" in made
    assert "| 1 |" not in made
    assert figures.with_tables(made) == made


@pytest.mark.parametrize("name", PRETRAINED)
def test_a_card_is_that_of_its_network_and_of_its_record(name: str) -> None:
    card, known = models.card(name), description_of(models.pretrained(name))
    about = {**card, "classes": known.class_names, "shape": known.input_shape}
    page = render("card.md.j2", name=name, digest=PRETRAINED[name], **about)
    page = page.replace(f'models.load("{name}.safetensors")', f'models.pretrained("{name}")')
    assert (ROOT / "docs" / "cards" / f"{name}.md").read_text() == page
    lines = [line for path in sorted((ROOT / "results").glob("*.jsonl")) for line in path.read_text().splitlines()]
    records = [r for r in map(json.loads, lines) if r["hash"] == card["hash"] and "evaluation" in r]
    assert {**records[0]["evaluation"], "hardware": None} == {**card["figures"], "hardware": None}
    assert len(records) == 1
