"""The tables of docs/performance.md from the files in results/bench: `python benchmarks/tables.py`."""

import json
from pathlib import Path
from typing import Any

from orthoconv.lab.timing import Figures

RESULTS = Path(__file__).parents[1] / "results" / "bench"
NETWORKS = ["kwlarge", "kwlarge_width_3", "resnet9", "wide_resnet10_10"]


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


def tables() -> list[str]:
    """All of them."""
    networks = [network_table(case) for name in NETWORKS for case in cases(name)]
    return [summary_table(), *networks, layer_table(), *(network_table(case) for case in cases("kwlarge_kept"))]


if __name__ == "__main__":
    print("\n\n".join(tables()))
