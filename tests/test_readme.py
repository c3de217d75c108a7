"""The README's code blocks and commands do what it says."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from orthoconv.nn import conv_methods

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True)


def test_python_blocks() -> None:
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    assert len(blocks) >= 2
    namespace: dict[str, object] = {}
    for text in blocks:
        exec(compile(text, "README.md", "exec"), namespace)


LAB = [line for line in COMMANDS if "orthoconv" in line or "activate" in line]


def test_every_command_is_accounted_for() -> None:
    """A new command in the README needs a test here, or has to be what runs these tests."""
    assert len(LAB) == 7
    assert [c for c in COMMANDS if c not in LAB] == [
        "make demo",
        "pip install --constraint constraints.txt .",
        "make test",
    ]
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


def test_every_method_is_in_the_table() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    for name in conv_methods():
        assert any(f'| `"{name}"` |' in row for row in rows), name


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_make_demo() -> None:
    page = ROOT / "runs" / "demo" / "cayley" / "report.html"
    page.unlink(missing_ok=True)
    result = run("make demo")
    assert result.returncode == 0, result.stderr
    assert page.stat().st_size > 50_000
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("cayley  "))
    clean, certified = float(row[1].rstrip("%")), float(row[2].rstrip("%"))
    assert clean >= 96
    assert certified >= 85


@pytest.mark.slow
def test_train_evaluate_and_report() -> None:
    """As they stand, one after the other in one shell."""
    shutil.rmtree(ROOT / "runs" / "digits", ignore_errors=True)
    assert run("make .venv/.installed").returncode == 0
    result = run(" && ".join(LAB))
    assert result.returncode == 0, result.stderr
    assert (ROOT / "runs" / "digits" / "report.html").stat().st_size > 50_000
    assert "runs/digits: verified, 7 layers" in result.stdout
    assert (ROOT / "runs" / "bench" / "networks.json").stat().st_size > 500


@pytest.mark.slow
def test_pip_install(tmp_path: Path) -> None:
    """In a new virtual environment, the library alone: it computes, and the command says what it misses."""
    venv.create(tmp_path, with_pip=True)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    result = run("pip install --constraint constraints.txt .", PATH=path)
    assert result.returncode == 0, result.stderr
    code = "import orthoconv, torch; orthoconv.models.pretrained('kwlarge_cayley_cifar10'); "
    code += "print(orthoconv.nn.CayleyConv2d(3, 4, 3)(torch.ones(3, 4, 4)).shape)"
    result = subprocess.run([tmp_path / "bin" / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == "torch.Size([4, 4, 4])", result.stderr
    result = subprocess.run([tmp_path / "bin" / "orthoconv"], cwd=tmp_path, capture_output=True, text=True)
    assert 'pip install "orthoconv[lab]"' in result.stderr
    assert sys.prefix not in path.split(os.pathsep)[0]
