"""The tables of docs/performance.md from the files in results/bench.

`python benchmarks/tables.py` prints them; with --write it puts each one between its two marks in the page.
`sh benchmarks/record.sh` makes the files again, and then the tables. A table whose record is older than the code of the
layers says so by itself.
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from orthoconv.lab.machine import code_digest
from orthoconv.lab.timing import Figures

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench"
PAGE = ROOT / "docs" / "performance.md"
OLD = "*Recorded with older code of the layers than this; `sh benchmarks/record.sh` records it again.*"
NETWORKS = ["kwlarge", "kwlarge_width_3", "resnet9", "wide_resnet10_10", "wide_resnet10_10_batch_128"]


def cases(name: str) -> list[dict[str, Any]]:
    """The cases of one file."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["cases"]
    return found


def network_table(case: dict[str, Any]) -> str:
    """One line per method."""
    figures, paper = {name: Figures(**f) for name, f in case["figures"].items()}, case["paper"]
    plain, cayley = figures["plain"], figures["cayley"]
    lines = [
        f"**{case['network']}, width {case['width']}, batch {case['batch']}** ({len(plain.train)} rounds)\n",
        "| method | x plain | spread | x Cayley | eval x plain | memory x plain | paper x plain | paper x Cayley |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, f in figures.items():
        said = [
            f"{paper[name] / paper[base]:.2f}" if {name, base} <= set(paper) else "" for base in ("plain", "cayley")
        ]
        lines.append(
            f"| {name} | {f.train_median / plain.train_median:.2f} | {f.spread:.0%} "
            f"| {f.train_median / cayley.train_median:.2f} | {f.evaluate_median / plain.evaluate_median:.2f} "
            f"| {f.peak / plain.peak:.2f} | {said[0]} | {said[1]} |"
        )
    return "\n".join(lines)


def summary_table() -> str:
    """One line per network: time of a training step over that of the plain network in the same run."""
    lines = ["| network | here | listing | orthogonium's AOC | the paper, on a GPU |", "|---|---|---|---|---|"]
    for file, name in (("resnet9", "ResNet9"), ("wide_resnet10_10", "WideResNet10-10"), ("kwlarge", "KWLarge")):
        (case,) = cases(file)
        train = {method: Figures(**f).train_median for method, f in case["figures"].items()}
        paper = case["paper"]
        ratios = [train[m] / train["plain"] if m in train else None for m in ("cayley", "listing", "orthogonium")]
        ratios.append(paper["cayley"] / paper["plain"] if "plain" in paper else None)
        shown = ["" if r is None else f"{r:.2f}" if r < 1 else f"{r:.1f}" for r in ratios]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def layer_table() -> str:
    """One line per layer: Cayley against plain, and the others against Cayley."""
    others = ["listing", "bcop", "rko", "orthogonium"]
    lines = [
        f"| panel | layer | Cayley x plain | memory x plain | {' | '.join(f'{m} x Cayley' for m in others)} |",
        f"|---|---|---|---|{'---|' * len(others)}",
    ]
    for case in cases("layers"):
        figures = {name: Figures(**f) for name, f in case["figures"].items()}
        train = {name: f.train_median for name, f in figures.items()}
        memory = figures["cayley"].peak / figures["plain"].peak
        layer = f"{case['c']} -> {case['o']}, {case['k']} x {case['k']} taps, {case['n']} x {case['n']}"
        ratios = " | ".join(f"{train[m] / train['cayley']:.2f}" if m in train else "" for m in others)
        lines.append(
            f"| {case['panel']} | {layer} | {train['cayley'] / train['plain']:.2f} | {memory:.2f} | {ratios} |"
        )
    return "\n".join(lines)


def regime_table() -> str:
    """One line per layer: time over plain of Cayley, and of the fastest of the others, in training and in eval mode."""
    lines = [
        "| channels | image | batch | Cayley x plain | fastest other | Cayley x plain, eval | memory x plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases("regimes"):
        figures = {name: Figures(**f) for name, f in case["figures"].items()}
        plain, cayley = figures.pop("plain"), figures.pop("cayley")
        best = min(figures, key=lambda m: figures[m].train_median)
        lines.append(
            f"| {case['c']} | {case['n']} x {case['n']} | {case['b']} | {cayley.train_median / plain.train_median:.1f} "
            f"| {best}, {figures[best].train_median / plain.train_median:.1f} "
            f"| {cayley.evaluate_median / plain.evaluate_median:.1f} | {cayley.peak / plain.peak:.1f} |"
        )
    return "\n".join(lines)


def ratio(seconds: dict[str, list[float]]) -> float:
    """Our time over that of the published formula: the median of the ratios of single turns."""
    return statistics.median(a / b for a, b in zip(seconds["ours"], seconds["published"], strict=True))


def published_table() -> str:
    """A column per method, a line per padding of the published formulas."""
    seconds = json.loads((RESULTS / "published.json").read_text())["seconds"]
    methods = list(seconds["circular"])
    lines = [f"| references | {' | '.join(methods)} |", f"|---|{'---|' * len(methods)}"]
    for padding, label in (("circular", "padded circularly"), ("zeros", "padded by zeros")):
        found = seconds[padding]
        shown = [f"{ratio(found[m]):.2f}" if m in found else "" for m in methods]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All of them, by the names of their marks in the page."""
    networks = {name: "\n\n".join(map(network_table, cases(name))) for name in (*NETWORKS, "kwlarge_kept")}
    regimes = {"regimes": regime_table()} if (RESULTS / "regimes.json").exists() else {}
    found = {"summary": summary_table(), **networks, "layers": layer_table(), **regimes}
    found["published"] = published_table()
    old = set(stale())
    old |= {"summary"} if old & set(NETWORKS) else set()
    return {name: f"{table}\n\n{OLD}" if name in old else table for name, table in found.items()}


def marked(name: str, table: str) -> str:
    """Return a table between its marks."""
    return f"<!-- {name}: python benchmarks/tables.py --write -->\n{table}\n<!-- end of {name} -->"


def write(page: Path = PAGE) -> None:
    """Put the tables into the page."""
    text = page.read_text()
    for name, table in tables().items():
        parts = re.split(rf"<!-- {name}:.*?<!-- end of {name} -->", text, flags=re.DOTALL)
        text, count = marked(name, table).join(parts), len(parts) - 1
        if count != 1:
            raise ValueError(f"{page} has {count} places for the table {name}, expected 1")
    page.write_text(text)


def stale() -> list[str]:
    """Return the names of the records that are of other code than this."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    code = code_digest()
    return [name for name, record in records.items() if record.get("code") != code]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        print("\n\n".join(tables().values()))
