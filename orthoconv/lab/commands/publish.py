"""`orthoconv publish`: write a trained run as a file that users can load, with its card."""

__all__ = ["publish"]

from pathlib import Path
from typing import Any

from orthoconv.files import sha256, write_atomically
from orthoconv.lab.pages import render
from orthoconv.lab.paper.records import run_record
from orthoconv.lab.runs import Run
from orthoconv.models.describing import description_of
from orthoconv.models.trained import run_arguments
from orthoconv.weights import compact, read, write


def publish(run: Path, name: str, out: Path = Path("runs/published")) -> None:
    """Write the weights of an evaluated run and a card that describes it: NAME.safetensors and NAME.md.

    Example: orthoconv publish runs/digits my_digits --out runs/published

    Args:
        run: Folder of the run.
        name: Name of the file, without its suffix.
        out: Folder to write to.
    """
    folder = Run(run)
    if not folder.evaluation_path.is_file():
        raise FileNotFoundError(f"{run} has no evaluation; run: orthoconv evaluate {run}")
    if Path(name).name != name:
        raise ValueError(f"name must be the name of a file without its folder and suffix, got {name!r}")
    network, path = folder.load_model(), out / f"{name}.safetensors"
    known = description_of(network)
    card = {**_card(folder), "classes": None if known.class_names is None else list(known.class_names)}
    write(path, {f"model.{k}": compact(v) for k, v in network.state_dict().items()}, {"state": card})
    digest = sha256(read(path)[0])
    page = render("card.md.j2", name=name, digest=digest, shape=known.input_shape, **card)
    write_atomically(out / f"{name}.md", page.encode())
    print(f"weights: {path}\nSHA-256 of the weights: {digest}\ncard: {out / name}.md")


def _card(run: Run) -> dict[str, Any]:
    """Return how a network was built and trained, on what machine, and its figures."""
    record, training = run_record(run), run.training.config
    used = {"cpu_minutes": round(record["cpu_seconds"] / 60, 1)} if record.get("cpu_seconds") else {}
    return {
        "data": training["data"], "examples": training["examples"], "model": run_arguments(run.folder),
        "start": training.get("start"), "recipe": record["config"]["recipe"],
        "figures": {k: v for k, v in record["evaluation"].items() if k != "hardware"},
        "hardware": record["hardware"], "minutes": round(record["seconds"] / 60, 1), **used,
        "hash": record["hash"],
    }  # fmt: skip
