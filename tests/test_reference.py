"""Every public name has a page with its arguments and an example that runs."""

import doctest
import importlib
import inspect
import sys
from pathlib import Path

import pytest
from torch import Tensor

import orthoconv

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "hooks"))
import reference

ENTRIES = reference.entries()
PAGES = reference.pages()
every_name = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.title)
NOT_RUN = {"to_onnx"}  # it takes seconds, and tests/test_export.py runs it


def lacks(entry: reference.Entry) -> list[str]:
    """What the docstring of a name leaves out."""
    missing = []
    if not entry.summary.strip():
        missing.append("a sentence that says what it is")
    if ">>>" not in entry.text or ("+SKIP" in entry.text and entry.name not in NOT_RUN):
        missing.append("an example that runs")
    is_error = entry.is_class and issubclass(entry.value, Exception)
    if entry.is_code and not is_error and not inspect.isabstract(entry.value):
        taken = [p for p in inspect.signature(entry.value).parameters if p not in ("args", "kwargs")]
        if taken and "Arguments" not in entry.text and "Attributes:" not in entry.text:
            missing.append(f"its arguments, {', '.join(taken)}")
    return missing


@every_name
def test_the_docstring_is_complete(entry: reference.Entry) -> None:
    assert not lacks(entry), f"{entry.title} lacks {' and '.join(lacks(entry))} in its docstring"


@every_name
def test_there_is_a_page(entry: reference.Entry) -> None:
    text = PAGES[entry.path]
    assert text.startswith(f"# {entry.title}\n")
    assert "## Example\n\n```pycon\n>>>" in text
    if entry.is_class and issubclass(entry.value, orthoconv.nn.Layer):
        assert "**Guarantee:**" in text
        assert "## Shape" in text or inspect.isabstract(entry.value)


def test_every_public_name_is_there() -> None:
    shown = {id(e.value) for e in ENTRIES}
    for module in (orthoconv, *(importlib.import_module(f"orthoconv.{m}") for m in reference.MODULES)):
        for name in module.__all__:
            value = getattr(module, name)
            assert inspect.ismodule(value) or id(value) in shown, name
            assert (
                f"| [`{value.__name__ if inspect.ismodule(value) else name}`]"
                in PAGES[f"{reference.FOLDER}/{module.__name__}/index.md"]
            )
    assert {m for m in orthoconv.__all__ if inspect.ismodule(getattr(orthoconv, m))} == set(reference.MODULES)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if not e.is_code], ids=lambda e: e.title)
def test_examples_of_constants_run(entry: reference.Entry) -> None:
    """Those of classes and functions are doctests of their modules, which pytest collects."""
    names = vars(importlib.import_module(entry.module)).copy()
    example = doctest.DocTestParser().get_doctest(entry.text, names, entry.title, None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def test_what_is_missing_is_seen() -> None:
    def bare(x: Tensor) -> Tensor:
        return x

    def half(x: Tensor) -> Tensor:
        """Return the half.

        >>> half(1)  # doctest: +SKIP
        """
        return x / 2

    assert len(lacks(reference.Entry("orthoconv.nn", "bare", bare))) == 3
    assert len(lacks(reference.Entry("orthoconv.nn", "half", half))) == 2
    assert reference.constant_doc(orthoconv.certificates, "no_such_name") == ""


def test_pages_have_arguments_of_bases_and_formulas() -> None:
    page = PAGES["reference/orthoconv.nn/CayleyConv2d.md"]
    assert "`signs`\n:   " in page
    assert "`kernel_size`\n:   Taps" in page, "of ImageLayer, by way of BaseConv2d"
    assert r"\begin{bmatrix}" in PAGES["reference/orthoconv.linalg/cayley.md"]
    assert ":math:" not in "".join(PAGES.values())
    assert len({path.lower() for path in PAGES}) == len(PAGES), "on some disks names differ in case alone"
