"""docs/features.md has a row for all there is."""

import inspect
import re
from pathlib import Path

import pytest

import orthoconv

PAGE = Path(__file__).parent.parent / "docs" / "features.md"


def named(text: str) -> set[str]:
    """Names of ours on the page: in backticks in the first column of a table, or in the sentence about bases."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    bases = re.findall(r"Bases for methods of your own:.*?\.", text, re.DOTALL)
    return set(re.findall(r"`(\w+)`", " ".join(rows + bases)))


def layers() -> set[str]:
    return {name for name in orthoconv.nn.__all__ if inspect.isclass(getattr(orthoconv.nn, name))}


def losses() -> set[str]:
    """Public functions of `orthoconv.train` that take (logits or scores, labels, ...)."""
    functions = {name: getattr(orthoconv.train, name) for name in orthoconv.train.__all__}
    first = {n: [*inspect.signature(f).parameters][:2] for n, f in functions.items() if inspect.isfunction(f)}
    return {name for name, taken in first.items() if taken in (["logits", "labels"], ["scores", "labels"])}


def certificates() -> set[str]:
    public = orthoconv.certificates.__all__
    return {name for name in public if inspect.isfunction(getattr(orthoconv.certificates, name))}


def test_everything_has_a_row() -> None:
    page = named(PAGE.read_text())
    assert {"MaxMin", "CayleyConv2d"} <= layers()
    assert {"hinge_loss", "offset_cross_entropy"} <= losses()
    assert {"certify", "lipschitz_bound"} <= certificates()
    missing = (layers() | losses() | certificates()) - page
    assert not missing, f"docs/features.md has no row for {sorted(missing)}"


def rows_with(name: str) -> list[list[str]]:
    """Cells of the rows that name a part of another library."""
    rows = [line.strip("|\n").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [row for row in rows if any(f"`{name}`" in cell for cell in row[1:])]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("AOCLipschitzResBlock", "CPLConv2d"),
        ("conv_orthogonal_", None),
        ("bjorck_norm", "orthogonal"),
        ("frobenius_norm", "FrobeniusLinear"),
        ("lconv_norm", None),
        ("SymmetricPad", None),
        ("HingeMarginLoss", "hkr_loss"),
        ("HingeMulticlassLoss", "hkr_loss"),
        ("CategoricalHingeLoss", None),
        ("LseHKRMulticlassLoss", None),
        ("TauBCEWithLogitsLoss", "tau_cross_entropy"),
        ("CosineLoss", "vra_loss"),
    ],
)
def test_parts_of_the_other_libraries_stand_beside_what_computes_the_same(name: str, ours: str | None) -> None:
    """tests/test_losses.py compares the losses. A part that is not here has a dash, and the reason."""
    rows = rows_with(name)
    assert rows, f"docs/features.md does not name {name}"
    if ours is None:
        assert [row[0].strip() for row in rows] == ["-"]
        assert "Not here" in rows[0][1]
    else:
        assert f"`{ours}" in rows[0][0]


def test_a_layer_without_a_row_would_be_missed() -> None:
    text = PAGE.read_text()
    without = "\n".join(line for line in text.splitlines() if "`HouseHolder` (HH1)" not in line)
    assert layers() - named(without) == {"HouseHolder"}, "a name in the column of another library does not count"


def test_rows_have_all_columns() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    assert len(tables) >= 7
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
