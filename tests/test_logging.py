"""Figures of a run reach TensorBoard and other loggers; a shell completes commands and options."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orthoconv.lab import cli
from orthoconv.lab.commands.completion import options, words
from orthoconv.lab.configs import ModelSpec, Training
from orthoconv.lab.logging import TensorBoard
from orthoconv.lab.runs import Run
from orthoconv.lab.training import train_run
from orthoconv.train import Recipe

SMALL = ["--model.layers", "[flatten, head]", "--recipe.epochs", "2", "--recipe.augment", "false"]


class Writer:
    """In place of torch's SummaryWriter."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def add_scalar(self, name: str, value: float, at: int) -> None:
        with (self.folder / "scalars.txt").open("a") as file:
            print(name, float(value), at, sep="\t", file=file)

    def flush(self) -> None:
        pass


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    cli.main(["train", "--out", str(tmp_path / "run"), "--tensorboard", "true", *SMALL])
    rows = [line.split("\t") for line in (tmp_path / "run" / "scalars.txt").read_text().splitlines()]
    metrics = Run(tmp_path / "run").metrics()
    certified = [float(v) for name, v, _ in rows if name == "epoch/certified 36 of 255"]
    assert certified == [m["certified"]["36/255"] for m in metrics]
    assert [int(at) for name, _, at in rows if name == "step/loss"] == list(range(1, metrics[-1]["step"] + 1))


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "orthoconv\[tensorboard\]"'):
        TensorBoard(tmp_path)


def test_another_logger(tmp_path: Path) -> None:
    class Memory:
        def __init__(self) -> None:
            self.steps: list[dict[str, object]] = []
            self.epochs: list[dict[str, object]] = []

        def step(self, figures: dict[str, object]) -> None:
            self.steps.append(figures)

        def epoch(self, figures: dict[str, object]) -> None:
            self.epochs.append(figures)

    memory, run = Memory(), Run(tmp_path)
    training = Training("digits", ModelSpec(layers=["flatten", "head"]), Recipe(epochs=2, augment=False))
    train_run(run, training, loggers=[memory])
    assert memory.epochs == run.metrics()
    assert len(memory.steps) == memory.epochs[-1]["step"]


def test_words() -> None:
    known = words(cli.COMMANDS)
    assert "train" in known[""]
    assert known[" bench"] == ["networks", "layers", "regimes"]
    assert {"--model.conv", "--recipe.epochs", "--device", "--help"} <= set(known[" train"])
    assert "--names" in options(cli.COMMANDS["bench"]["networks"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["tr"], ["train"]),
        (["bench", ""], ["layers", "networks", "regimes"]),
        (["train", "--model.co"], ["--model.conv"]),
        (["train", "--out", "runs/x", "--recipe.epo"], ["--recipe.epochs"]),
        (["bench", "layers", "--pan"], ["--panels"]),
        (["no_such", "--model.co"], []),
    ],
)
def test_bash(typed: list[str], completed: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out
    line = " ".join(f"'{w}'" for w in ["orthoconv", *typed])
    script += f"COMP_WORDS=({line}); COMP_CWORD={len(typed)}; _orthoconv; printf '%s\\n' \"${{COMPREPLY[@]}}\"\n"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert sorted(result.stdout.split()) == completed


def test_zsh(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["completion", "zsh"])
    assert capsys.readouterr().out.startswith("autoload -U bashcompinit && bashcompinit\n_orthoconv()")
