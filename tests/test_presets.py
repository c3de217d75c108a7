"""Presets: each is valid, says what it costs and reaches, and can be changed by other options."""

import json
import re
from pathlib import Path

import pytest
import yaml

from orthoconv.lab import preset
from orthoconv.lab.cli import main
from orthoconv.lab.commands import train
from orthoconv.lab.configs import Training
from orthoconv.lab.paper.records import read_records
from orthoconv.lab.preset import expand_preset, preset_names, preset_opening

RESULTS = Path(__file__).parents[1] / "results"
FOLDER = Path(preset.__file__).parent / "presets"


@pytest.mark.parametrize("name", preset_names())
def test_presets_open_with_command_cost_and_score(name: str) -> None:
    opening = preset_opening(name)
    assert f"orthoconv train --preset {name}" in opening
    assert re.search(r"^Cost", opening, flags=re.M)
    assert re.search(r"^Score", opening, flags=re.M)
    fields = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert Training.of(fields).config["recipe"]["loss"] == "offset_cross_entropy"
    assert set(fields) == {"data", "model", "recipe"}
    assert name in (train.train.__doc__ or ""), "the help names it"


@pytest.mark.parametrize("name", preset_names())
def test_scores_are_those_of_the_records(name: str) -> None:
    config = Training.of(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    records = [r for r in read_records(RESULTS) if r.get("experiment") == "finalist" and r["hash"] == config.hash]
    opening = preset_opening(name)
    assert bool(records) == bool(re.search(r"\d\d\.\d % clean", opening)), "a score has a record, and a record a score"
    for record in records:
        figures = [record["metrics"][key] for key in ("clean", "certified_36", "certified_72", "certified_108")]
        assert all(f"{figure:.1f}" in opening for figure in figures)


def test_other_options_override_a_preset(tmp_path, capsys) -> None:
    options = ["--recipe.epochs", "1", "--model.width", "0.125", "--examples", "128", "--out", str(tmp_path / "run")]
    main(["train", *options, "--preset", "digits"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["recipe"]["epochs"], config["model"]["width"], config["examples"]) == (1, 0.125, 128)
    assert (config["model"]["head"], config["recipe"]["loss"]) == ("normalized", "offset_cross_entropy")
    assert "orthoconv train --preset digits" in capsys.readouterr().out


def test_a_preset_takes_images_of_another_size(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--recipe.epochs", "1", "--model.width", "0.125", "--examples", "64", "--recipe.batch_size", "32"]
    main(["train", "--preset=cifar10-fast", "--data", "digits", *small])
    assert json.loads(Path("runs/train/config.json").read_text())["network"]["image_size"] == [8, 8]


def test_a_preset_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match=r"preset must be one of cifar10-best, cifar10-fast, .* got 'imagenet'"):
        main(["train", "--preset", "imagenet"])
    assert expand_preset(["evaluate", "--preset", "x"]) == ["evaluate", "--preset", "x"]
