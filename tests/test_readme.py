"""The code blocks and commands of the README and of the pages do what they say; the README's numbers are records."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from orthoconv.lab.cli import main
from orthoconv.nn import conv_methods, methods

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
COMMANDED = ["README.md", "docs/tutorial.md", "docs/performance.md", "docs/reproducing.md"]  # in this order


def blocks(path: Path, kind: str) -> list[str]:
    """Blocks of code of one kind. Those called `py`, or nothing, are shown and not run."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", path.read_text(), flags=re.M | re.S)


COMMANDS = [line for name in COMMANDED for text in blocks(ROOT / name, "sh") for line in text.splitlines()]


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, shell=True, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_python_blocks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in one session; what a page registers is forgotten afterwards."""
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for text in blocks(path, "python"):
        exec(compile(text, path.name, "exec"), namespace)


def test_the_readme_is_one_screen_with_eight_lines_of_code() -> None:
    assert len(README.splitlines()) <= 100
    (code,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line.strip()]) == 8
    assert README.index("pip install") < README.index("```python") < README.index("make demo") < 3500
    (picture,) = re.findall(r"!\[[^\]]*\]\((docs/pictures/[^)]*)\)", README)
    assert 10_000 < (ROOT / picture).stat().st_size < 300_000


def test_the_numbers_are_those_of_the_records(load_script) -> None:
    headline = load_script("docs/headline.py")
    assert headline.table() in README, "run `python docs/headline.py`"
    assert headline.renewed(README) == README
    assert headline.renewed(README.replace("% certified", "% confirmed")) == README
    assert re.search(
        r"\*\*\d\d\.\d % certified\*\*.*\n.*\*\*\d\.\d\d times as long\*\*.*\n.*\*\*0 of [\d,]+ broken", README
    )
    with pytest.raises(ValueError, match="has 0 records with the hash 'none'"):
        headline.record({"records": "kwlarge_provable.jsonl", "hash": "none"})


LAB = [line for line in COMMANDS if "orthoconv" in line or "activate" in line]


def test_every_command_is_accounted_for() -> None:
    """A new command in these pages needs a test here, or has to be what runs these tests."""
    assert len(LAB) == 7
    assert [c for c in COMMANDS if c not in LAB] == [
        "pip install --constraint constraints.txt .",
        "make demo",
        "make test",
    ]
    assert "make test\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("line", [line for line in LAB if line.startswith("orthoconv ")])
def test_every_command_is_understood(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The test that runs them as they stand takes minutes; here they are parsed, and a misspelt option is not."""
    args = shlex.split(line)[1:]
    with pytest.raises(SystemExit) as stop:
        main([*args, "--print_config"])
    assert not stop.value.code, capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*args, "--misspelt", "1", "--print_config"])
    assert stop.value.code, "the negative control"


def test_every_method_is_in_the_table() -> None:
    rows = [line for line in (ROOT / "docs" / "names.md").read_text().splitlines() if line.startswith("| `")]
    for name in conv_methods():
        assert any(f'| `"{name}"` |' in row for row in rows), name


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


@pytest.mark.long
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
