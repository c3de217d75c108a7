"""The ladder of docs/certified.md and its picture, from the records that results/ladder.json names.

`python docs/certified.py` writes both anew.
"""

import json
import re
from pathlib import Path
from typing import Any

from orthoconv.nn import conv_methods

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "certified.md"
PICTURE = ROOT / "docs" / "pictures" / "cost.png"
_PLACE = re.compile(r"(<!-- ladder[^>]*-->\n).*?(\n<!-- end of ladder -->)", re.S)
_RADII = (36, 72, 108)  # over 255
BLUE, GREY = "#1f5fbf", "#8a8f98"

# Training cost in operations, as estimated in the text, and certified accuracy at 36/255. Sources are in the page.
THEIRS = {
    "Cayley, KWLarge (2021)": (3e14, 59.2),
    "LOT-XS, 2 h": (3e15, 59.6),
    "LOT, LipConvNet-5": (1.3e15, 61.8),
    "CPL-S, 2 h": (1e16, 61.1),
    "SOC-M, 10 h": (1e17, 66.0),
}


def read_rung(rung: dict[str, Any]) -> dict[str, Any]:
    """Return what a rung changes, its accuracy in percent at each radius, its epochs and its cost in minutes."""
    lines = (ROOT / "results" / rung["records"]).read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["hash"] == rung["hash"]]
    if len(records) != 1:
        raise ValueError(f"results/{rung['records']} has {len(records)} records with the hash {rung['hash']!r}, not 1")
    (record,) = records
    before = record.get("started_from", {})
    return {
        "change": rung["change"],
        "mirrored": rung.get("mirrored", False),
        "local": rung.get("local", False),
        "accuracy": _accuracy(record, rung.get("mirrored", False)),
        "epochs": before.get("epochs", 0) + record["config"]["recipe"]["epochs"],
        "members": record["config"]["model"].get("members", 1),
        "minutes": (before.get("seconds", 0) + record["seconds"]) / 60,
        "cpu_minutes": (before.get("cpu_seconds", 0) + record.get("cpu_seconds", 0)) / 60,
        "machine": f"{record['hardware']['cpu'].replace('(R)', '').split(' Processor')[0]}, "
        f"{record['hardware']['threads']} thread{'s' if record['hardware']['threads'] > 1 else ''}",
        "config": record["config"],
    }


def _accuracy(record: dict[str, Any], mirrored: bool) -> list[float]:
    if "evaluation" in record:
        found = record["evaluation"]
        certified = found.get("certified_locally", found["certified"])
        return [100 * found["clean"], *(100 * certified[f"{r / 255:.6g}"] for r in _RADII)]
    metrics = record["metrics"]["mirrored"] if mirrored else record["metrics"]
    return [metrics["clean"], *(metrics[f"certified_{r}"] for r in _RADII)]


def rungs() -> list[dict[str, Any]]:
    """Return the rungs of the ladder, from the paper's recipe to ours."""
    return [read_rung(rung) for rung in json.loads((ROOT / "results" / "ladder.json").read_text())["rungs"]]


def table() -> str:
    """Return the ladder: one line for each change, with its accuracy on the test images and its cost."""
    lines = ["| what changes | epochs | clean | 36/255 | 72/255 | 108/255 | minutes | CPU minutes | machine |"]
    lines.append("|" + "---|" * 9)
    for r in rungs():
        same = r["mirrored"] or r["local"]
        cost = ["as above"] * 3 if same else [f"{r['minutes']:.0f}", f"{r['cpu_minutes']:.0f}", r["machine"]]
        cost[1] = "" if cost[1] == "0" else cost[1]
        figures = " | ".join(f"{a:.1f}" for a in r["accuracy"])
        epochs = f"{r['members']} x {r['epochs']}" if r["members"] > 1 else r["epochs"]
        lines.append(f"| {r['change']} | {epochs} | {figures} | {' | '.join(cost)} |")
    return "\n".join(lines)


def operations(words: list[str], batch: int) -> float:
    """Estimate the operations of a training step of a Cayley network in words, on images of 3 x 32 x 32 pixels.

    Counted are the products of matrices, as in benchmarks/operations.py.
    """
    total, c, n = 0.0, 3, 32
    for word in (w.split() for w in words):
        if word[0] == "downsample":
            c, n = c * int(word[1]) ** 2, n // int(word[1])
        elif word[0] == "conv":
            options = {w[0]: int(w[1:]) for w in word[2:] if w not in conv_methods()}
            s, o = options.get("s", 1), int(word[1])
            c, n, k = c * s * s, n // s, -(-options.get("k", 3) // s)
            total += _convolution(batch, c, o, k, n)
            c = o
        elif word[0] == "flatten":
            c, n = c * n * n, 1
        elif word[0] in ("linear", "head"):
            o = int(word[1]) if word[0] == "linear" else 10
            total += 6.0 * batch * c * o + (3.2 * o * o * (c - o) + 2 / 3 * o**3 + 6 * batch * o * o if o > 10 else 0)
            c = o
    return total


def _convolution(b: int, i: int, o: int, k: int, n: int) -> float:
    m, f = min(i, o), (n * n + 4) // 2 if n <= 8 else n * (n // 2 + 1)
    taps = 2 * k * k + ((2 * k - 1) ** 2 if i != o else 0)
    return f * (24.0 * b * i * o + 8 * m**3 + 8 * m * m * (max(i, o) - m) + 16 * taps * m * m)


def draw() -> None:
    """Draw certified accuracy against training cost, ours and theirs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, (cost, accuracy) in THEIRS.items():
        axis.plot(cost, accuracy, "s", color=GREY)
        axis.annotate(name, (cost, accuracy), (6, -12), textcoords="offset points", color=GREY, fontsize=9)
    for r in rungs():
        if layers := r["config"]["model"].get("layers"):
            recipe = r["config"]["recipe"]
            epochs = r["members"] * r["epochs"]
            cost = operations(layers, recipe["batch_size"]) * (50000 // recipe["batch_size"]) * epochs
            open_circle = r["mirrored"] or r["config"]["model"].get("mirror", False)
            axis.plot(cost, r["accuracy"][1], "o", color=BLUE, fillstyle="none" if open_circle else "full")
            if not r["mirrored"]:
                _, preset, name = r["change"].partition("preset ")
                axis.annotate(
                    name if preset else "by local certificates" if r["local"] else "one network of it",
                    (cost, r["accuracy"][1]),
                    (-6, 8),
                    textcoords="offset points",
                    color=BLUE,
                    ha="right",
                )
    axis.set(
        xscale="log", xlim=(3e12, 1e18), ylim=(58, 68), xlabel="operations to train", ylabel="% certified at 36/255"
    )
    axis.set_title("CIFAR-10, test images; open circles: averaged over the mirror image", fontsize=10)
    axis.grid(alpha=0.3)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=130)


def renewed(text: str) -> str:
    """Return the page with the table as the records have it."""
    return _PLACE.sub(lambda match: match[1] + table() + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
    draw()
