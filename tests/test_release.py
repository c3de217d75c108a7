"""What a release promises: one version, links that resolve anywhere, workflows for the versions that are supported."""

import io
import re
import shutil
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HOSTS = {  # that exist; this project has none of its own yet
    "127.0.0.1", "ai.stanford.edu", "download.pytorch.org", "example.org", "github.com", "pytorch.org",
    "www.cs.toronto.edu",
}  # fmt: skip


@pytest.fixture
def release(load_script) -> ModuleType:
    return load_script(".github/release.py")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "orthoconv").mkdir()
    for name in ("README.md", "pyproject.toml", "CHANGELOG.md", "CITATION.cff", "orthoconv/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_one_version(release: ModuleType, copy: Path) -> None:
    (version,) = set(release.versions(ROOT).values())
    release.check(ROOT, f"v{version}")
    with pytest.raises(SystemExit, match=r"the tag is v9\.9\.9, but orthoconv/__init__.py has"):
        release.check(ROOT, "v9.9.9")
    (copy / "CITATION.cff").write_text("version: 0.0.1\n")
    with pytest.raises(SystemExit, match=r"but CITATION.cff has 0\.0\.1"):
        release.check(copy, f"v{version}")


def test_links_resolve_on_a_package_index(release: ModuleType, copy: Path) -> None:
    before = re.findall(r"\]\((?!\w+:|#)", (copy / "README.md").read_text())
    release.link(copy, "https://forge.test/me/orthoconv", "v0.1.0")
    text = (copy / "README.md").read_text()
    assert before
    assert not re.findall(r"\]\((?!\w+:|#)", text)
    assert "](https://forge.test/me/orthoconv/blob/v0.1.0/docs/tutorial.md)" in text
    assert "](https://forge.test/me/orthoconv/raw/v0.1.0/docs/pictures/certificate.png)" in text
    project = (copy / "pyproject.toml").read_text()
    assert '[project.urls]\nRepository = "https://forge.test/me/orthoconv"\n' in project
    assert "[project.scripts]\northoconv = " in project


def test_missing_parts_of_a_package_are_seen(release: ModuleType, tmp_path: Path) -> None:
    def write(left_out: str) -> None:
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            for name in release.NEEDED:
                archive.writestr(name, "")
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
            for name in release.IN_SOURCE:
                if name != left_out:
                    archive.addfile(tarfile.TarInfo(f"a/{name}"), io.BytesIO())

    write("")
    release.contents(tmp_path)
    write("docs/tutorial.md")
    with pytest.raises(SystemExit, match=r"missing in a\.tar\.gz: docs/tutorial\.md"):
        release.contents(tmp_path)
    assert all((ROOT / name).exists() for name in release.IN_SOURCE)


def test_workflows_run_the_oldest_and_the_newest() -> None:
    project = (ROOT / "pyproject.toml").read_text()  # Python 3.10 cannot parse it
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    matrix = jobs["suite"]["strategy"]["matrix"]["include"]
    oldest = matrix[0]
    assert f'requires-python = ">={oldest["python"]}"' in project
    assert f'"torch>={oldest["torch"].removesuffix(".0")}"' in project
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert {oldest["python"], max(listed, key=lambda v: int(v.partition(".")[2]))} <= {m["python"] for m in matrix}
    assert f"torch=={matrix[1]['torch']}\n" in (ROOT / "constraints.txt").read_text()
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())


def test_the_changelog_of_a_release_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    assert sections[0].startswith("0.1.0") or sections[0].startswith("Unreleased")
    (first,) = (s for s in sections if s.startswith("0.1.0"))
    assert len(first.splitlines()) <= 40


def hosts(text: str) -> set[str]:
    return set(re.findall(r"https?://([\w.-]+)", text))


def test_no_page_and_no_file_of_the_package_names_a_host_that_does_not_exist() -> None:
    assert hosts("see https://orthoconv.dev/docs, or http://github.com/a") == {"orthoconv.dev", "github.com"}
    paths = [
        *ROOT.glob("*.*"),
        *(p for part in ("docs", "examples", "orthoconv", ".github") for p in (ROOT / part).rglob("*")),
    ]
    files = [p for p in paths if p.suffix in (".md", ".toml", ".yml", ".yaml", ".cff", ".py", ".ipynb")]
    assert len(files) > 200
    found = {p.relative_to(ROOT).as_posix(): hosts(p.read_text()) - HOSTS for p in files}
    assert not any(found.values()), {name: names for name, names in found.items() if names}
