"""`orthoconv publish`: a trained run as a file that users can load, with its card."""

__all__ = ["publish"]

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from orthoconv.data import load
from orthoconv.files import sha256
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import ModelSpec, Run, run_record
from orthoconv.weights import read, save_weights


def publish(run: Path, name: str, out: Path = Path("runs/published"), data_dir: Path | None = None) -> None:
    """Write the weights of a run, evaluated, and a card that says what it is: NAME.safetensors and NAME.md.

    Args:
        run: Folder of the run.
        name: Name for users to load it by.
        out: Folder to write to.
        data_dir: Where the data set is; by default where it usually is.
    """
    folder = Run(run)
    if not folder.evaluation_path.is_file():
        raise FileNotFoundError(f"{run} has no evaluation; run: orthoconv evaluate {run}")
    training, _ = load(folder.config["data"], data_dir, download_bar())
    training = training.first(folder.config.get("examples", 0))
    about = card_of(folder, ModelSpec(**folder.config["model"]).options(training))
    path = out / f"{name}.safetensors"
    save_weights(path, folder.load_model(training), about)
    digest = sha256(read(path)[0])
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    text = files("orthoconv.lab").joinpath("card.md.j2").read_text()
    (out / f"{name}.md").write_text(template.from_string(text).render(name=name, digest=digest, **about))
    print(f"weights: {path}\nSHA-256 of the weights: {digest}\ncard: {out / name}.md")


def card_of(run: Run, model: dict[str, Any]) -> dict[str, Any]:
    """What a network was trained on, how, by what, and what it reaches."""
    record = run_record(run)
    figures = {k: v for k, v in record["evaluation"].items() if k != "hardware"}
    config = record["config"]
    return {
        "data": config["data"], "examples": config.get("examples", 0), "model": model, "recipe": config["recipe"],
        "figures": figures,
        "hardware": record["hardware"], "minutes": round(record["seconds"] / 60, 1), "hash": record["hash"],
    }  # fmt: skip
