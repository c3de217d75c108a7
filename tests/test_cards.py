"""The code on the card of a network runs, and says what the network says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from orthoconv import models, predict
from orthoconv.data.names import class_names
from orthoconv.lab.cli import main

CARDS = Path(__file__).parents[1] / "docs" / "cards"
OPTIONS = ("--model.width", "0.25", "--recipe.epochs", "1", "--recipe.augment", "false", "--examples", "128")


def code_of(card: str) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", card, flags=re.M | re.S)
    return block


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a published run; its evaluation, which would take long, is that of another network."""
    place = tmp_path_factory.mktemp("published")
    main(["train", "--data", "digits", "--out", str(place / "run"), "--recipe.batch_size", "64", *OPTIONS])
    figures = models.card("kwlarge_cayley_cifar10")["figures"]
    (place / "run" / "evaluation.json").write_text(json.dumps(figures))
    main(["publish", str(place / "run"), "small", "--out", str(place)])
    return place


def test_the_code_of_a_published_card(
    published: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(published)
    torch.manual_seed(0)
    exec(compile(code_of((published / "small.md").read_text()), "small.md", "exec"), {})
    out = capsys.readouterr().out
    torch.manual_seed(0)
    model = models.load(published / "run")
    assert out.strip() == str(predict(model, torch.rand(1, 8, 8)))
    assert re.match(r"\d \(class \d\), margin \d", out), "digits have their digit as a name"


def test_a_published_file_knows_its_classes(published: Path) -> None:
    model = models.load(published / "small.safetensors")
    assert model.class_names == class_names("digits")
    assert model.input_shape == (1, 8, 8)
    assert "| classes | 0, 1, 2, 3" in (published / "small.md").read_text()


def test_a_name_stays_in_its_folder(published: Path) -> None:
    with pytest.raises(SystemExit, match=r"without its folder and suffix, got '\.\./x'"):
        main(["publish", str(published / "run"), "../x", "--out", str(published / "inner")])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem == "cifar10_best" else [])
        for path in sorted(CARDS.glob("*.md"))
    ],
)
def test_the_code_of_a_card_of_the_package(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(code_of(path.read_text()), path.name, "exec"), namespace)
    assert re.match(r"\w+ \(class \d\), margin [\d.]+, certified radius [\d.]+\n$", capsys.readouterr().out)
    assert ", ".join(namespace["model"].class_names) in path.read_text()
