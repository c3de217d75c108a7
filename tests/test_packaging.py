"""The sdist has everything that its own tests read, and the wheel everything that the commands read."""

import re
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

import orthoconv

ROOT = Path(__file__).parents[1]
ALWAYS = {"README.md", "LICENSE", "pyproject.toml", ".gitignore"}  # hatchling adds these by itself
OF_OTHERS = {".git", "PKG-INFO"}


def included() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.sdist]")[2]
    return set(re.findall(r'"/([^"]+)"', section.partition("]\n")[0]))


def of_the_project() -> set[str]:
    """Files and folders of the checkout, without what .gitignore names."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    names = {path.name for path in ROOT.iterdir()} - OF_OTHERS
    return {name for name in names if not any(fnmatch(name, pattern) for pattern in ignored)}


def test_the_sdist_has_the_whole_checkout() -> None:
    assert of_the_project() - ALWAYS == included()
    assert {"tests", "Makefile", "results", ".ci"} <= included()


def test_data_of_the_package_is_no_python() -> None:
    """What a wheel must have beside its modules; the next test looks for it in one."""
    kinds = {path.suffix for path in data_files()}
    assert kinds >= {".yaml", ".j2", ".gz", ".safetensors"}


def data_files() -> list[Path]:
    package = Path(orthoconv.__file__).parent
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    return [path.relative_to(package.parent) for path in files]


@pytest.mark.slow
def test_built_archives(tmp_path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        assert set(map(str, data_files())) <= set(archive.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
    assert names - {""} == (of_the_project() | {"PKG-INFO"})
