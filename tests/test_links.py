"""Links of the documentation lead to files and headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("results/*.md")]
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)


def headings(text: str) -> set[str]:
    """Anchors of a page, as Python-Markdown makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in plain}


def dead_links(path: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("``", text)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if (name and not file.exists()) or (anchor and anchor not in headings(file.read_text() if name else text)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_dead_links(path: Path) -> None:
    assert not dead_links(path, path.read_text())


def test_dead_links_are_found() -> None:
    text = "# One two\n[a](#one-two) [b](README.md) [c](missing.md) [d](#three) [e](README.md#no-such) `[f](code.md)`\n"
    assert dead_links(ROOT / "page.md", text) == ["missing.md", "#three", "README.md#no-such"]
