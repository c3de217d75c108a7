"""Figures in the prose of the documentation, each with a comment that says where its value comes from.

A comment stands right behind its figure, and pages do not show it:
`74.8<!-- kwlarge_provable a1ca69 evaluation/clean % -->`. It has a value, or two values with " - " or " / " between
them. A value is one of

- `FILE HASH KEY`: in the record of results/FILE.jsonl whose digest starts so; `/` leads into the record;
- `cell EXPERIMENT BUDGET ROW COLUMN`: the mean of a cell of a table, with `_` for a space; `deviation` in place of
  `cell` is the deviation of our seeds, `paper` the paper's mean;
- `bench FILE METHOD PART`: median of the training times (`train`), or of eval mode (`evaluate`), or the peak of memory;
- `card NAME KEY`: in the card of a network that comes with the package.

A table stands between `<!-- table EXPERIMENT BUDGET -->` and `<!-- end of table -->`, and is made from the records.

`%` behind a value multiplies it by 100, `minutes` divides it by 60. `python docs/figures.py` lists what does not agree.
With `--write` it corrects figures and tables; the words around them remain to be read again.
"""

import json
import re
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any

from orthoconv import models
from orthoconv.lab.paper.experiment import load_experiment
from orthoconv.lab.paper.records import read_records
from orthoconv.lab.paper.tables import Table, make_table, markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
_MARKED = re.compile(r"(?<![\d.])([\d,]*\.?\d+)( %)?<!-- ([^>]*) -->")
_TABLES = re.compile(r"<!-- table (\w+) (\w+) -->.*?<!-- end of table -->", flags=re.S)
_FACTORS = {"%": 100.0, "minutes": 1 / 60}


@cache
def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


@cache
def _table(experiment: str, budget: str) -> Table:
    return make_table(load_experiment(experiment), budget, read_records(RESULTS))


def _inside(found: Any, key: str) -> float:
    for part in key.split("/"):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return float(found)


def _record(name: str, digest: str, key: str) -> float:
    matching = [r for r in _lines(name) if r["hash"].startswith(digest)]
    if len(matching) != 1:
        raise ValueError(f"results/{name}.jsonl has {len(matching)} records whose hash starts with {digest!r}, not 1")
    return _inside(matching[0], key)


def _cell(part: str, experiment: str, budget: str, label: str, column: str) -> float:
    table = _table(experiment, budget)
    (row,) = (row for row in table.rows if row.label.replace(" ", "_") == label)
    (name,) = {name for _, name in table.cells if name.replace(" ", "_") == column}  # which may have a `_` of its own
    cell = table.cells[row.key, name]
    if part == "deviation":
        return statistics.stdev(cell.ours)
    return statistics.fmean(cell.ours) if part == "cell" else cell.paper[0]


def _bench(name: str, method: str, part: str) -> float:
    (case,) = json.loads((RESULTS / "bench" / f"{name}.json").read_text())["cases"]
    found = case["figures"][method.replace("_", " ")][part]
    return statistics.median(found) if isinstance(found, list) else float(found)


def _value(source: str) -> float:
    words = source.split()
    factor = _FACTORS[words.pop()] if words[-1] in _FACTORS else 1.0
    kind, *rest = words
    if kind in {"cell", "deviation", "paper"}:
        return factor * _cell(kind, *rest)
    if kind == "bench":
        return factor * _bench(*rest)
    if kind == "card":
        return factor * _inside(models.card(rest[0]), rest[1])
    return factor * _record(kind, *rest)


def value(source: str) -> float:
    """Return the value that a comment names."""
    if " - " in source:
        left, right = source.split(" - ")
        return _value(left) - _value(right)
    if " / " in source:
        left, right = source.split(" / ")
        return _value(left) / _value(right)
    return _value(source)


def marked(text: str) -> list[tuple[str, str]]:
    """Return each marked figure as it is written, and its source."""
    return [(match[1], match[3]) for match in _MARKED.finditer(text)]


def disagreements(text: str) -> list[str]:
    """Return the figures of a page that are not their values, rounded to as many digits as are written."""
    wrong = []
    for written, source in marked(text):
        decimals, expected = _decimals(written), value(source)
        if not _agrees(written, expected):
            wrong.append(f"{written} is {expected:.{decimals}f} by {source!r}")
    return wrong


def _decimals(written: str) -> int:
    return len(written.partition(".")[2])


def _agrees(written: str, expected: float) -> bool:
    return abs(float(written.replace(",", "")) - expected) <= 0.5 * 10 ** -_decimals(written) + 1e-9


def with_tables(text: str) -> str:
    """Return a page with each marked table as the records have it."""

    def made(match: re.Match[str]) -> str:
        table = markdown(_table(match[1], match[2]))
        return f"<!-- table {match[1]} {match[2]} -->\n\n{table}\n\n<!-- end of table -->"

    return _TABLES.sub(made, text)


def corrected(text: str) -> str:
    """Return a page with the value of each figure that differs from it, rounded to as many digits as are written."""

    def rounded(match: re.Match[str]) -> str:
        comma, expected = "," * ("," in match[1]), value(match[3])
        if _agrees(match[1], expected):
            return match[0]
        return f"{expected:{comma}.{_decimals(match[1])}f}{match[2] or ''}<!-- {match[3]} -->"

    return _MARKED.sub(rounded, text)


if __name__ == "__main__":
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        old = ["a table is not that of its records"] if with_tables(text) != text else []
        for line in disagreements(text) + old:
            print(f"{page.relative_to(ROOT)}: {line}")
        if "--write" in sys.argv[1:]:
            page.write_text(with_tables(corrected(text)))
