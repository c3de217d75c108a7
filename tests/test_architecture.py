"""The layout of the package: tiers, names, what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import orthoconv

PACKAGE = Path(orthoconv.__file__).parent
TIERS = [
    {"allocator", "files", "testing", "tracing"},
    {"linalg", "planes", "weights", "data"},
    {"fourier"},
    {"nn"},
    {"models", "lipschitz"},
    {"rounding"},
    {"certify", "attacks", "convert", "export", "verify"},
    {"train"},
    {"lab"},
]
INDEPENDENT = {"certify", "attacks", "train"}  # these take any nn.Module
ENTRY = {"__init__", "__main__"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(module: str) -> str:
    """The part of the package that `orthoconv.<part>...` names."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, `from orthoconv import x` counted as orthoconv.x."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names |= {f"{node.module}.{a.name}" if node.module == "orthoconv" else str(node.module) for a in node.names}
    return names


def tier(name: str) -> int:
    return next(k for k, parts in enumerate(TIERS) if name in parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_tier_imports_only_lower_tiers(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ENTRY:
        return
    for module in imports(path):
        if module.split(".")[0] != "orthoconv" or part(module) in {own, "__version__"}:
            continue
        assert tier(part(module)) < tier(own), f"{own} (tier {tier(own)}) imports {module}"
        assert not (own in INDEPENDENT and part(module) in {"nn", "models"}), f"{own} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_lab_prints(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] in {"lab", "__main__.py"}:
        return
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
    assert not {m.split(".")[0] for m in imports(path)} & {"argparse", "jsonargparse", "matplotlib", "tqdm"}


def test_importing_costs_torch_and_nothing_else() -> None:
    code = """
import sys, torch
before = {m.partition('.')[0] for m in sys.modules}
import orthoconv
new = {m.partition('.')[0] for m in sys.modules} - before - set(sys.stdlib_module_names)
print(sorted(new))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['orthoconv']"


def test_public_names_exist() -> None:
    for module in (orthoconv, orthoconv.nn, orthoconv.fourier, orthoconv.linalg, orthoconv.testing):
        for name in module.__all__:
            assert getattr(module, name) is not None
