"""Hooks of mkdocs: the reference, pages from outside this folder, notebooks, formulas, pages that are not there yet."""

import html
import posixpath
import re
from pathlib import Path
from typing import Any

import notebook
import reference
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ABOVE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "examples/README.md")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: the reference, the tables of results, and of the pages to come those that are there."""
    nav = [_present(entry, Path(config.docs_dir)) for entry in config.nav or []]
    config.nav = [entry for entry in nav if entry]
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] += reference.navigation()
        if "Start" in entry:
            pages = ["examples/README.md", *({p.name: f"examples/{p.stem}.md"} for p in EXAMPLES)]
            entry["Start"].append({"Examples": pages})
        if "Evidence" in entry:
            entry["Evidence"].append({"Tables": [_above(p) for p in sorted((ROOT / "results").glob("*.md"))]})
    return config


def _above(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _place(path: Path) -> str:
    """Where a file from outside this folder stands on the site."""
    return "index.md" if path == ROOT / "README.md" else _above(path)


def _present(entry: Any, docs: Path) -> Any:
    """Leave out pages of the navigation that nobody has written yet."""
    if isinstance(entry, str):
        if (entry in ABOVE and (ROOT / entry).exists()) or entry == "index.md":
            return entry
        return entry.replace(".ipynb", ".md") if (docs / entry).exists() else None
    ((title, below),) = entry.items()
    if isinstance(below, str):
        found = _present(below, docs)
        return {title: found} if found else None
    kept = [k for k in (_present(b, docs) for b in below) if k]
    return {title: kept} if kept or title in ("Start", "Evidence", "Reference") else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, the notebooks, and pages and files that lie outside this folder."""
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    for source in sorted(Path(config.docs_dir).glob("notebooks/*.ipynb")):
        text, pictures = notebook.to_markdown(source)
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
        files.append(File.generated(config, f"notebooks/{source.stem}.md", content=text))
    outside = [ROOT / name for name in ABOVE] + sorted((ROOT / "results").glob("*.md"))
    for source in EXAMPLES:
        text = f"# {source.name}\n\n```python\n{source.read_text()}```\n"
        files.append(File.generated(config, f"examples/{source.stem}.md", content=text))
    for source in outside:
        if source.exists():
            files.append(File.generated(config, _place(source), content=source.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site; a link to a file that the site does not have becomes plain text.

    The front page gets the width of the navigation, which would have its own name alone. A search ranks the
    pages of public names higher.
    """
    here = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith("reference/") and page.file.name != "index":
        page.meta["search"] = {"boost": 2}
    at_top = page.file.src_uri in (*ABOVE, "index.md") or page.file.src_uri.startswith("results/")

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"\w+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(here, path))
        if at_top:
            place = place.removeprefix("docs/")
        place = "index.md" if place.removeprefix("../") == "README.md" else place.removeprefix("../")
        place = re.sub(r"\.ipynb$|(?<=^examples/)(\w+)\.py$", lambda m: f"{m[1] or ''}.md", place)
        file = files.get_file_from_path(place)
        if file is None or file.inclusion.is_excluded():
            return text
        relative = posixpath.relpath(place, here or ".")
        return f"{mark}[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts = _CODE.split(markdown)
    if at_top and here:
        parts = [p if k % 2 else p.replace("](../docs/", "](../") for k, p in enumerate(parts)]
    return "".join(p if p.startswith("```") else _LINK.sub(link, p) for p in _whole_links(parts))


def _whole_links(parts: list[str]) -> list[str]:
    """Join inline code with the text around it again, so that links whose text is code stay whole."""
    joined: list[str] = [""]
    for part in parts:
        if part.startswith("```"):
            joined += [part, ""]
        else:
            joined[-1] += part
    return joined


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers draw without any script, and class the cells of tables."""

    def formula(match: re.Match[str]) -> str:
        latex, block = html.unescape(match[2]), match[1] == "div"
        latex = latex.strip().removeprefix(r"\[" if block else r"\(").removesuffix(r"\]" if block else r"\)")
        return convert(latex.strip(), display="block" if block else "inline")

    content = re.sub(r'<(span|div) class="arithmatex">(.*?)</\1>', formula, content, flags=re.S)
    return re.sub(r"<td(?=[ >])(.*?)>(.*?)</td>", _sized_cell, content, flags=re.S)


def _sized_cell(match: re.Match[str]) -> str:
    """Class a cell of a table by the length of its text, for the layout on narrow screens (site.css)."""
    length = len(html.unescape(re.sub(r"<.*?>", "", match[2], flags=re.S)).strip())
    name = "short" if length <= 30 else "long" if length > 40 else ""
    return match[0] if not name or "class=" in match[1] else f'<td class="{name}"{match[1]}>{match[2]}</td>'
