"""The notebooks run from top to bottom, and are shown on the site with what they draw."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "hooks"))
import notebook

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


@pytest.mark.slow
@every_notebook
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = notebook.execute(json.loads(path.read_text())["cells"])
    assert any(cell.get("outputs") for cell in cells)


@every_notebook
def test_it_is_small_and_has_stored_outputs(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 200_000
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert any(cell.get("outputs") for cell in cells), "run `python docs/hooks/notebook.py docs/notebooks/*.ipynb`"
    assert "/tmp/" not in text
    page, pictures = notebook.to_markdown(path)
    assert page.startswith("# ")
    assert page.count("```python") == sum(cell["cell_type"] == "code" for cell in cells)
    assert all(data.startswith(b"\x89PNG") for data in pictures.values())


def test_there_are_three() -> None:
    assert [path.stem for path in PATHS] == ["convert_and_train", "every_method", "first_certificate"]


def test_cells_share_names_and_show_their_last_value() -> None:
    def cell(source: str) -> dict[str, object]:
        return {"cell_type": "code", "source": [source], "outputs": []}

    shown = notebook.execute([cell("a = 2\nprint('hi')"), {"cell_type": "markdown", "source": []}, cell("a + 1")])
    assert shown[0]["outputs"][0]["text"] == ["hi\n"]
    assert shown[2]["outputs"][0]["data"]["text/plain"] == ["3"]
    with pytest.raises(AssertionError):
        notebook.execute([cell("assert False")])
