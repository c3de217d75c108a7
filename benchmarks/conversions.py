"""Convert real models of packages that are installed, train each on a toy, and record what became of it.

    python benchmarks/conversions.py [--only TEXT] [--steps N] [--limit SECONDS] [--records FILE]
    python benchmarks/conversions.py --parts [--only TEXT]  # quickly: layers that are only said to have the norm 1
    python benchmarks/conversions.py --table   # write the table of docs/conversion.md anew from the records

A package that is not installed is left out, and so is a model that has a record with as many steps, unless --again is
given. A record has the Lipschitz bound of the converted model; the signal, that is how large a random change of the
input is in the output; how many parameters a backward pass leaves without a gradient; the accuracy on a toy with 4
classes after N steps; and, since November 2026, the commit of the package at the start.
"""

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import standins
import torch
from real_models import Make, models
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import ConversionError, convert, lipschitz_bound
from orthoconv.lab.machine import hardware

_ROOT = Path(__file__).resolve().parent.parent
RECORDS, PAGE = _ROOT / "results" / "bench" / "conversions.jsonl", _ROOT / "docs" / "conversion.md"
_TABLE, _GAINS = (
    (f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n") for name in ("conversions", "gains of signal")
)
_IMAGES, _BATCH, _CLASSES = 64, 8, 4


def examine_parts(make: Make, shape: tuple[int, ...]) -> dict[str, Any]:
    """Convert one model with stand-ins for its layers: whether all parts have a rule, and parameters a gradient."""
    torch.manual_seed(0)
    try:
        new = convert(make().train(), shape, conv=standins.NAME)
    except ConversionError as error:
        return {"refused": str(error)}
    return {"parts": True, "without_gradient": without_gradient(new, shape)}


def examine(make: Make, shape: tuple[int, ...], steps: int, limit: float) -> dict[str, Any]:
    """Convert one model, and find out what it is worth."""
    torch.manual_seed(0)
    start = time.process_time()
    try:
        new = convert(make().train(), shape)
    except ConversionError as error:
        return {"refused": str(error)}
    facts: dict[str, Any] = {"bound": lipschitz_bound(new.eval(), shape), "signal": signal(new, shape)}
    facts["without_gradient"] = without_gradient(new.train(), shape)
    facts["parameters"] = sum(p.numel() for p in new.parameters())
    accuracy = toy_accuracy(new, shape, steps, start + limit) if steps else None
    if accuracy is not None:
        facts |= {"accuracy": accuracy, "trained_bound": lipschitz_bound(new, shape)}
    return facts


@torch.no_grad()
def signal(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Norm of the change of the output over that of a random change of the input."""
    source = torch.Generator().manual_seed(0)
    x, d = (torch.rand(4, *shape, generator=source), 1e-2 * torch.randn(4, *shape, generator=source))
    moved = (model(x + d) - model(x)).flatten(1).norm(dim=1)
    return float((moved / d.flatten(1).norm(dim=1)).mean())


def without_gradient(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Parameters that a backward pass leaves without a gradient, or with one that is not finite."""
    y = model(torch.rand(4, *shape))
    (y * torch.randn_like(y)).sum().backward()
    return sum(p.grad is None or not bool(p.grad.isfinite().all()) for p in model.parameters())


def toy(shape: tuple[int, ...], dense: bool) -> tuple[Tensor, Tensor]:
    """Noisy images of 4 quarters, and their labels.

    For a network with one answer for an image, one quarter is bright, and the label says which. For one with an answer
    for each pixel, the quarters have the 4 brightnesses in any order, and the labels (b, h, w) are those of the pixels.
    """
    source = torch.Generator().manual_seed(1)
    x = 0.3 * torch.rand(_IMAGES, *shape, generator=source)
    orders = torch.rand(_IMAGES, 4, generator=source).argsort(1) if dense else (torch.arange(_IMAGES) % 4)[:, None]
    quarters = orders if dense else (torch.arange(4) == orders).long() * 2
    h, w = -(-shape[-2] // 2), -(-shape[-1] // 2)
    pixels = quarters.view(-1, 2, 2).repeat_interleave(h, 1).repeat_interleave(w, 2)[:, : shape[-2], : shape[-1]]
    return x + 0.35 * pixels[:, None], pixels if dense else orders[:, 0]


def toy_accuracy(model: nn.Module, shape: tuple[int, ...], steps: int, until: float) -> float | None:
    """Accuracy on the toy after so many steps of Adam, of images or of pixels; None if the time is over before."""
    with torch.no_grad():
        y = model(torch.zeros(2, *shape))
    x, labels = toy(shape, y.ndim > 2)
    if y.ndim > 2:
        labels = F.interpolate(labels[:, None].float(), y.shape[2:])[:, 0].long()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for k in range(steps):
        batch = torch.arange(_BATCH * k, _BATCH * (k + 1)) % _IMAGES
        loss = F.cross_entropy(20 * model(x[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.process_time() > until:
            return None
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == labels).double().mean())


def table(records: list[dict[str, Any]]) -> str:
    """The records in Markdown, after a sentence that counts them."""
    converted = [r for r in records if "bound" in r or "parts" in r]
    bounds = [max(r["bound"], r.get("trained_bound", 0)) for r in converted if "bound" in r]
    trained = [r for r in converted if "accuracy" in r]
    better = sum(r["accuracy"] > 1 / _CLASSES for r in trained)
    lines = [
        f"{len(converted)} of {len(records)} convert, "
        f"{sum(not r['without_gradient'] for r in converted)} of them with a gradient at every parameter. "
        f"{len(bounds)} have real layers: the largest bound is {max(bounds):.6f}. "
        f"{len(trained)} were trained on the toy, and {better} of them end above its chance of {100 / _CLASSES:.0f} %.",
        "",
        "| package | model | input | bound | signal | toy | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in records:
        name = f"| {r['package']} | {r['model']} | {'x'.join(map(str, r['input']))} |"
        if "bound" in r:
            score = f"{100 * r['accuracy']:.0f} %" if "accuracy" in r else ""
            lines.append(f"{name} {max(r['bound'], r.get('trained_bound', 0)):.7f} | {r['signal']:.2g} | {score} | |")
        elif "parts" in r:
            lines.append(f"{name} parts | | | |")
        else:
            lines.append(f"{name} | | | {first_part(r['refused'])} |")
    return "\n".join(lines) + "\n"


def gains(records: list[dict[str, Any]]) -> str:
    """Signals of models from before layers started near the identity (records without a commit), and from after."""
    signals = [(f"{r['package']} {r['model']}", "commit" in r, r["signal"]) for r in records if "signal" in r]
    before, after = ({name: value for name, new, value in signals if new is kind} for kind in (False, True))
    lines = ["| model | signal before | since layers start near the identity |", "|---|---|---|"]
    rows = [f"| {name} | {before[name]:.2g} | {after[name]:.2g} |" for name in sorted(before.keys() & after.keys())]
    return "\n".join([*lines, *rows]) + "\n"


def first_part(text: str) -> str:
    """The first part that was refused, and how many more there are."""
    parts = text.splitlines()
    listed = text.startswith("these parts")
    more = f" (and {len(parts) - 2} more)" if listed and len(parts) > 2 else ""
    return (parts[1] if listed else parts[0]).strip().replace("|", "/") + more


def best(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest record of each model that says most about it; in order of package and model."""

    def worth(r: dict[str, Any]) -> int:
        return 2 if "accuracy" in r else 1 if "bound" in r else 0

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for r in records:
        old = found.get((r["package"], r["model"]), {})
        found[r["package"], r["model"]] = old if "refused" not in r and worth(old) > worth(r) else r
    return [found[key] for key in sorted(found)]


def renewed(page: str, records: list[dict[str, Any]]) -> str:
    """The page with the tables of these records."""
    for (begin, end), text in {_TABLE: table(best(records)), _GAINS: gains(records)}.items():
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def origin() -> dict[str, Any]:
    """What records are made with: the commit of the package, with + if it has been changed, and torch's version."""
    return {k: v for k, v in hardware(torch.device("cpu")).items() if k in ("commit", "torch")}


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Convert the models that were asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose package/name contains one of these words")
    parser.add_argument("--steps", type=int, default=0, help="steps of training on the toy")
    parser.add_argument("--limit", type=float, default=1e9, help="CPU seconds of a model, after which the toy is left")
    parser.add_argument("--parts", action="store_true", help="stand-ins for layers; no bound and no training")
    parser.add_argument("--again", action="store_true", help="also models that have a record with as many steps")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file to add a line to for each model")
    parser.add_argument("--table", action="store_true", help="write the table of docs/conversion.md, and no more")
    args = parser.parse_args()
    if args.table:
        PAGE.write_text(renewed(PAGE.read_text(), read(args.records)))
        return
    warnings.simplefilter("ignore")
    made_with = origin()  # at the start, since files may change meanwhile
    known = {
        (r["package"], r["model"])
        for r in read(args.records)
        if r["steps"] >= args.steps and (args.parts or "parts" not in r)
    }
    for package, name, make, shape in models():
        if ((package, name) in known and not args.again) or not any(
            w in f"{package}/{name}" for w in args.only.split() or [""]
        ):
            continue
        start = time.process_time()
        try:
            facts = examine_parts(make, shape) if args.parts else examine(make, shape, args.steps, args.limit)
        except Exception as error:  # a defect, to be seen in the table
            facts = {"refused": f"{type(error).__name__}: {error}", "failed": True}
        seconds = round(time.process_time() - start, 1)
        record = {"package": package, "model": name, "input": shape, "steps": args.steps, **facts, "cpu": seconds}
        with args.records.open("a") as file:
            file.write(json.dumps(record | made_with) + "\n")
        print(json.dumps(record)[:300], flush=True)


if __name__ == "__main__":
    main()
