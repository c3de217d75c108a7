"""What a release checks and fills in: `python .github/release.py check v0.1.0 | link URL REF | contents dist`."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("orthoconv/py.typed", "orthoconv/models/kwlarge_cayley_cifar10.safetensors", "orthoconv/nn/cayley.py")
IN_SOURCE = (*NEEDED, "tests/test_contract.py", "docs/tutorial.md", "README.md", "LICENSE", "CITATION.cff")


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file names."""
    patterns = {
        "orthoconv/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    found = {}
    for name, pattern in patterns.items():
        match = re.search(pattern, (root / name).read_text(), re.M)
        found[name] = match[1] if match else "none"
    return found


def check(root: Path, tag: str) -> None:
    """Stop unless the tag and all files name one version."""
    found = versions(root)
    if wrong := {name: version for name, version in found.items() if f"v{version}" != tag}:
        raise SystemExit(f"the tag is {tag}, but {', '.join(f'{n} has {v}' for n, v in wrong.items())}")


def link(root: Path, url: str, ref: str) -> None:
    """Make the relative links of the README absolute, and add the URLs of the project to its metadata."""
    readme, project = root / "README.md", root / "pyproject.toml"
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{url}/raw/{ref}/", readme.read_text())
    readme.write_text(re.sub(r"(?<!!)(\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{url}/blob/{ref}/", text))
    urls = (
        f'[project.urls]\nRepository = "{url}"\nIssues = "{url}/issues"\nChangelog = "{url}/blob/{ref}/CHANGELOG.md"\n'
    )
    project.write_text(project.read_text().replace("[project.scripts]", f"{urls}\n[project.scripts]"))


def contents(folder: Path) -> None:
    """Stop unless the wheel and the source package have what users need."""
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    with tarfile.open(source) as archive:
        outside = {name.partition("/")[2] for name in archive.getnames()}
    missing = [f"{wheel.name}: {n}" for n in NEEDED if n not in inside]
    if missing := missing + [f"{source.name}: {n}" for n in IN_SOURCE if n not in outside]:
        raise SystemExit(f"missing in {'; '.join(missing)}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "check":
        check(ROOT, *arguments)
    elif command == "link":
        link(ROOT, *arguments)
    else:
        contents(Path(*arguments))
