"""Files that nobody vouches for: reading them executes nothing, and takes little time and memory."""

import ast
import os
import pickle
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import orthoconv
from orthoconv.data import DataError
from orthoconv.data.unpickling import unpickle_batch
from orthoconv.train import CheckpointError, load_weights

PACKAGE = Path(orthoconv.__file__).parent

_EXECUTES = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "os.system",
        "os.popen",
        "runpy.run_path",
        "marshal.loads",
        "shelve.open",
    ),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load", "dill.load", "dill.loads", "cloudpickle.load"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.export.load", "torch.package.PackageImporter"),
    *("numpy.load", "np.load", "pandas.read_pickle", "shutil.unpack_archive", "importlib.import_module"),
}
_METHODS = {"extract", "extractall"}


def dangers(source: str) -> list[str]:
    """Calls of a file that could execute what they read, or write where an archive says.

    What is imported by name counts with its module; an Unpickler may be derived from by a class with its own
    `find_class`, and torch.load may be called with weights_only=True.
    """
    tree, found = ast.parse(source), []
    full = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            unpicklers = [base for base in map(ast.unparse, node.bases) if "Unpickler" in base]
            if unpicklers and not any(getattr(item, "name", "") == "find_class" for item in node.body):
                found.append(node.name)
        if not isinstance(node, ast.Call):
            continue
        head, dot, tail = ast.unparse(node.func).partition(".")
        name, options = full.get(head, head) + dot + tail, {k.arg: ast.unparse(k.value) for k in node.keywords}
        trusted = name == "torch.load" and options.get("weights_only") == "True"
        asked = any(options.get(k, "False") != "False" for k in ("shell", "allow_pickle", "trust_repo"))
        if (name in _EXECUTES and not trusted) or tail.split(".")[-1] in _METHODS or asked:
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_of_the_package_executes_what_it_reads(path: Path) -> None:
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "from pickle import loads as read\nread(data)",
        "import pickle\npickle.Unpickler(file).load()",
        "import pickle\nclass Safe(pickle.Unpickler):\n    pass",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "eval(text)",
        "archive.extractall(folder)",
        "subprocess.run(text, shell=True)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
    ],
)
def test_what_executes_is_found(source: str) -> None:
    assert dangers(source)


def test_what_does_not_execute_is_not() -> None:
    assert not dangers("import torch, yaml\ntorch.load(p, weights_only=True)\nyaml.safe_load(t)\nmodel.eval()")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_reading_weights_and_batches_executes_nothing(tmp_path) -> None:
    mark, path = tmp_path / "executed", tmp_path / "model.safetensors"
    for save in (partial(torch.save, Evil(mark)), lambda file: pickle.dump(Evil(mark), file)):
        with path.open("wb") as file:
            save(file)
        with pytest.raises(CheckpointError, match=f"{path} is damaged"):
            load_weights(path, nn.Linear(2, 2))
    with pytest.raises(DataError, match=r"asks for .*mkdir"):
        unpickle_batch(path.read_bytes())
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists(), "the control: it does execute where it is trusted"


def test_batches_import_nothing() -> None:
    """A module that only has to be imported to run, under a name that arrays do need."""
    with pytest.raises(DataError, match=r"asks for numpy\.f2py\.__main__\.dtype"):
        unpickle_batch(b"\x80\x02cnumpy.f2py.__main__\ndtype\n.")
    assert "numpy.f2py.__main__" not in sys.modules


def test_batches_of_a_few_bytes_do_not_fill_the_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="no data and labels"):
            unpickle_batch(b"\x80\x02Nr\x00\x00\x40\x00.")  # remembers None as the object of number 4194304
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def text(content: str) -> bytes:
    """A string, as a pickle has it."""
    return b"X" + len(content.encode()).to_bytes(4, "little") + content.encode()


_ENCODE = b"c_codecs\nencode\n"
_NESTED = b"K\x01" + b"".join(b"q%c0(h%ch%cl" % (k, k, k) for k in range(28))  # a list of twice a list of twice a list
BOMBS = {
    "a shape": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\x00\x00\x00\x70\x85U\x01b\x87R",
    "a slow codec": _ENCODE + text("".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))) + text("punycode") + b"\x86R",
    "the same bytes again": _ENCODE + b"q\x000" + text("a" * 20_000) + b"q\x010" + text("latin1") + b"q\x020"
    + b"(" + b"h\x00h\x01h\x02\x86R" * 4000 + b"l",
    "a key that takes forever to hash": b")" + b"2\x86" * 31 + b"q\x000}h\x00Ns",
    "labels in lists": b"}U\x06labels" + _NESTED + b"sU\x04dataNs",
    "a bytearray": b"\x96" + (1 << 30).to_bytes(8, "little"),
}  # fmt: skip


def test_batches_take_few_steps() -> None:
    with pytest.raises(DataError, match="more than 200000 steps"):
        unpickle_batch(b"\x80\x02" + b"]" * 200_000 + b".")


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_batches_do_not_expand(data: bytes) -> None:
    """Nor in time: each of these took seconds, or more memory than a hundred times its size."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(DataError):
            unpickle_batch(b"\x80\x02" + data + b".")
        assert tracemalloc.get_traced_memory()[1] < (1 << 22) + 100 * len(data)
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 10  # under tracemalloc, which makes Python several times slower
