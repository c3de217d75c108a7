import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("matplotlib")


def run(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "orthoconv"]
    return subprocess.run([sys.executable, *command, *args], capture_output=True, text=True, timeout=120)


def test_demo_makes_its_picture_and_its_table(tmp_path: Path) -> None:
    result = run("demo", "--out", str(tmp_path / "new" / "folder"), "--steps", "20")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "new" / "folder" / "demo.png").stat().st_size > 50_000
    (cayley,) = (line for line in result.stdout.splitlines() if line.startswith("Cayley"))
    low, high = (float(v) for v in cayley.split()[4:7:2])
    assert abs(low - 1) < 1e-5
    assert abs(high - 1) < 1e-5
    assert "|conv(x)|/|x| = 1.000000" in result.stdout


def test_help_and_version() -> None:
    assert "demo" in run("--help").stdout
    assert "--steps" in run("demo", "--help").stdout
    assert run("--version").stdout.split()[-1] == "0.1.0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--steps", "many"], "many"),
        (["demo", "--stesp", "3"], "stesp"),
        (["dance"], "dance"),
    ],
)
def test_bad_arguments(args: list[str], message: str) -> None:
    result = run(*args)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_without_the_lab_extra_the_command_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['jsonargparse'] = None; from orthoconv.__main__ import main; main()"
    result = run(code=code)
    assert result.returncode == 1
    assert 'pip install "orthoconv[lab]"' in result.stderr
    assert "Traceback" not in result.stderr
