"""The documentation builds without a warning, and needs nothing from a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import chromium
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it once; `make docs` does the same."""
    pytest.importorskip("material", reason="the documentation needs the extra docs: make .venv/.docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


def outside(text: str) -> list[str]:
    """Scripts, styles and pictures that a page loads from elsewhere."""
    return re.findall(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)", text)


@pytest.mark.slow
def test_nothing_comes_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 200
    for page in pages:
        assert not outside(page.read_text()), page
    assert "url(http" not in "".join(p.read_text() for p in site.rglob("*.css"))
    assert (site / "search" / "search_index.js").stat().st_size > 100_000, "search works from a file"


@pytest.mark.slow
def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    text = (site / "maths.html").read_text()
    assert text.count("<math") > 20
    assert "arithmatex" not in text


_SEEN = """({wide: document.documentElement.scrollWidth - innerWidth,
 lost: [...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src),
 ground: getComputedStyle(document.body).backgroundColor})"""


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_pages_fit_a_narrow_and_a_wide_window(site: Path, tmp_path: Path) -> None:
    """Nothing sticks out, no picture is missing, and a reader who asks for a dark page gets one."""
    names = ["index", "field", "performance", "notebooks/first_certificate", "reference/orthoconv.nn/CayleyConv2d"]
    with chromium.Browser(tmp_path) as browser:
        for name in names:
            grounds = []
            for width, dark in ((1300, False), (400, True)):
                browser.open((site / f"{name}.html").as_uri(), width, dark=dark)
                browser.run("localStorage.clear()")  # in which the page keeps the colours that were asked for first
                browser.open((site / f"{name}.html").as_uri(), width, dark=dark)
                seen = browser.run(_SEEN)
                assert seen["wide"] <= 0, (name, width)
                assert seen["lost"] == [], (name, width)
                grounds.append(seen["ground"])
            assert len(set(grounds)) == 2, name
        assert browser.messages == []


def test_what_comes_from_elsewhere_is_seen() -> None:
    assert outside('<script src="https://a.b/c.js">') == ["https://a.b/c.js"]
    assert outside('<a href="https://a.b">') == []
