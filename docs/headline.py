"""The three numbers of the README, from the records that results/headline.json names: `python docs/headline.py`."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from orthoconv.lab.machine import code_digest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
_PLACE = re.compile(r"(<!-- headline[^>]*-->\n).*?(\n<!-- end of headline -->)", re.S)


def record(chosen: dict[str, str]) -> dict[str, Any]:
    """Return the record that a line of results/headline.json names."""
    lines = (RESULTS / chosen["records"]).read_text().splitlines()
    found: list[dict[str, Any]] = [r for r in map(json.loads, lines) if r["hash"] == chosen["hash"]]
    if len(found) != 1:
        raise ValueError(
            f"results/{chosen['records']} has {len(found)} records with the hash {chosen['hash']!r}, not 1"
        )
    return found[0]


def certified(chosen: dict[str, str]) -> str:
    """Certified accuracy of one run, and the time of the processor that it took."""
    run = record(chosen)
    found, minutes = run["evaluation"], (run["started_from"]["cpu_seconds"] + run["cpu_seconds"]) / 60
    return (
        f"| **{100 * found['certified_locally_at_eps']:.1f} % certified** | of CIFAR-10's {found['examples']:,} test "
        f"images at radius 36/255, with {100 * found['clean']:.1f} % clean, after {minutes:.0f} CPU minutes of "
        f"training: {chosen['network']} ({100 * found['certified_at_eps']:.1f} % by the Lipschitz bound alone) "
        f"| [record]({chosen['page']}) |"
    )


def speed(chosen: dict[str, str]) -> str:
    """Time of a training step relative to the plain network."""
    run = json.loads((RESULTS / chosen["bench"]).read_text())
    (case, *_) = run["cases"]
    time = {name: statistics.median(figures["train"]) for name, figures in case["figures"].items()}
    paper = case["paper"]["cayley"] / case["paper"]["plain"]
    old = "" if run.get("code") == code_digest() else "; recorded with older code of the layers"
    return (
        f"| **{time['cayley'] / time['plain']:.2f} times as long** | a training step of a {chosen['network']}, "
        f"compared with ordinary convolutions, on an {run['hardware']['cpu']}; the formula as published takes "
        f"{time['listing'] / time['plain']:.1f} times as long there, and {paper:.1f} in the paper{old} "
        f"| [benchmark]({chosen['page']}) |"
    )


def trust(chosen: dict[str, str]) -> str:
    """Certificates under attack. `orthoconv evaluate` writes no record if a certified image is broken."""
    found = record(chosen)["evaluation"]
    if found["autoattack"] < found["certified_at_eps"]:
        raise ValueError("attacks leave less than is certified")
    certificates = round(found["certified_at_eps"] * found["attacked"])
    return (
        f"| **0 of {certificates:,} broken** | certificates of the paper's network under PGD and both APGDs of "
        f"AutoAttack; rounding errors are part of every radius | [reliability]({chosen['page']}) |"
    )


def table() -> str:
    """Return the table of the README."""
    chosen = json.loads((RESULTS / "headline.json").read_text())
    rows = (certified(chosen["certified"]), speed(chosen["speed"]), trust(chosen["trust"]))
    return "\n".join(("| | | evidence |", "|---|---|---|", *rows))


def renewed(text: str) -> str:
    """Return the README with the table as the records have it."""
    return _PLACE.sub(lambda match: match[1] + table() + match[2], text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(renewed(readme.read_text()))
