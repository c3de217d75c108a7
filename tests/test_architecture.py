"""The layout of the package: tiers, names, what an import costs."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

from torch import nn

import orthoconv

PACKAGE = Path(orthoconv.__file__).parent
TIERS = [
    {"allocator", "budget", "files", "margins", "modules", "testing", "tracing"},
    {"autograd", "data", "devices", "weights"},
    {"elimination", "products"},
    {"linalg", "planes"},
    {"convolutions"},
    {"fourier"},
    {"nn", "attacks"},
    {"models", "certificates"},
    {"conversion", "exporting", "predicting"},
    {"twins"},
    {"onnx_files"},
    {"train"},
    {"lab"},
]
INDEPENDENT = {"attacks", "train"}  # these take any nn.Module
ENTRY = {"__init__", "__main__"}
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of the syntax tree of a file, which every test here reads."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def part(module: str) -> str:
    """The part of the package that `orthoconv.<part>...` names."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, `from orthoconv import x` counted as orthoconv.x."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names |= {f"{node.module}.{a.name}" if node.module == "orthoconv" else str(node.module) for a in node.names}
    return names


def tier(name: str) -> int:
    return next(k for k, parts in enumerate(TIERS) if name in parts)


def test_a_tier_imports_only_lower_tiers() -> None:
    for path in FILES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for module in imports(path) if own not in ENTRY else ():
            if module.split(".")[0] != "orthoconv" or part(module) in {own, "__version__"}:
                continue
            assert tier(part(module)) < tier(own), f"{path} (tier {tier(own)}) imports {module}"
            assert not (own in INDEPENDENT and part(module) in {"nn", "models"}), f"{path} imports {module}"


def test_only_the_lab_prints() -> None:
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in {"lab", "__main__.py"}:
            continue
        calls = [n for n in nodes(path) if isinstance(n, ast.Call)]
        assert not [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"], path
        of_the_lab = {m.split(".")[0] for m in imports(path)} & {"argparse", "jsonargparse", "matplotlib", "tqdm"}
        assert not of_the_lab, f"{path} imports {of_the_lab}"


def test_importing_costs_torch_and_nothing_else_and_the_shipped_file_needs_nothing_of_the_lab() -> None:
    """What a base install lacks is blocked; what it has is in pyproject.toml."""
    code = """
import sys, torch
for name in ("jinja2", "jsonargparse", "matplotlib", "PIL", "yaml", "tqdm"):
    sys.modules[name] = None
before = {m.partition('.')[0] for m in sys.modules}
import orthoconv
new = {m.partition('.')[0] for m in sys.modules} - before - set(sys.stdlib_module_names)
orthoconv.attacks.pgd, orthoconv.data.load, orthoconv.train.fit
print(*sorted(new))
orthoconv.models.pretrained("kwlarge_cayley_cifar10")
print(*sorted({m.partition(".")[0] for m in sys.modules} & {"numpy", "safetensors"}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "orthoconv\nnumpy safetensors\n", result.stderr
    base = re.search(r"^dependencies = (.*)$", (PACKAGE.parent / "pyproject.toml").read_text(), flags=re.M)
    assert base is not None
    assert re.findall(r'"(\w+)>=', base[1]) == ["numpy", "safetensors", "torch"]


def test_public_names_exist() -> None:
    for module in (
        orthoconv,
        orthoconv.nn,
        orthoconv.certificates,
        orthoconv.fourier,
        orthoconv.linalg,
        orthoconv.testing,
    ):
        for name in module.__all__:
            assert getattr(module, name) is not None


def private_uses(path: Path) -> list[str]:
    """Private names of other objects that a file reads, by `a._b` or by an import; `self` and `cls` are its own."""
    own = {"self", "cls", "super"}
    used = []
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
            used.append((ast.unparse(node.value), node.attr))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("orthoconv"):
            used += [("import", a.name) for a in node.names if a.name.startswith("_") and a.name != "__version__"]
    return [f"{value}.{name}" for value, name in used if value not in own]


def defined(path: Path) -> set[str]:
    """Private names that a file defines: functions, classes, methods, assigned names and attributes of self."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if name.startswith("_")}


OF_OTHERS = {
    "_replace",
    "_asdict",
    "_fields",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
}  # of Python and torch


def test_no_module_uses_a_private_name_of_another() -> None:
    everywhere = set().union(*map(defined, FILES))
    for path in FILES:
        known = defined(path) | OF_OTHERS
        foreign = [use for use in private_uses(path) if use.rpartition(".")[2] not in known]
        assert not [use for use in foreign if use.rpartition(".")[2] in everywhere], path
        assert not [use for use in foreign if use.startswith("import.")], path


def test_functions_are_short() -> None:
    for path, node in ((p, n) for p in FILES for n in nodes(p)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = (node.body[-1].end_lineno or 0) - first.lineno + 1
            assert lines <= 45, f"{path.name}: {node.name} has {lines} lines"


def test_no_function_hides_a_module() -> None:
    """`orthoconv.x` is the module orthoconv/x.py wherever there is one."""
    for path in FILES:
        if path.name != "__init__.py":
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            package = importlib.import_module(".".join(("orthoconv", *parts[:-1])))
            module = importlib.import_module(".".join(("orthoconv", *parts)))
            assert getattr(package, parts[-1], module) is module, f"{package.__name__}.{parts[-1]}"


def test_public_layers_document_their_arguments_and_shapes() -> None:
    for name in orthoconv.nn.__all__:
        layer = getattr(orthoconv.nn, name)
        text = inspect.getdoc(layer) or ""
        if not isinstance(layer, type) or inspect.isabstract(layer):
            continue
        assert "Shape:" in text, name
        own = [p for p in inspect.signature(layer).parameters if p not in inspect.signature(nn.Module).parameters]
        assert not own or "rguments" in text, name
