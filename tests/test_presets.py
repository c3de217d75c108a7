"""Presets: each is valid, says what it costs and reaches, and can be changed by other options."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orthoconv.data import DATASETS
from orthoconv.lab import preset
from orthoconv.lab.cli import main
from orthoconv.lab.commands import train
from orthoconv.lab.configs import Training
from orthoconv.lab.paper.records import read_records
from orthoconv.lab.preset import expand_preset, preset_for, preset_names, preset_opening

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
    assert set(fields) - {"start"} == {"data", "model", "recipe"}
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


@pytest.mark.parametrize(
    ("size", "network", "message"),
    [
        ((10, 10), "kwlarge", "multiples of 4, and these have 10 x 10 pixels; --resize 8 makes them fit"),
        ((33, 14), "kwlarge", r"multiples of 4, and these have 33 x 14 pixels; --resize \[16,32\] makes them fit"),
        ((20, 20), "resnet9", "resnet9 takes images whose sides are multiples of 16, .* --resize 16 makes them fit"),
        ((3, 3), "kwlarge", "--resize 4 makes them fit"),
    ],
)
def test_a_preset_on_a_folder_says_which_size_fits(
    size: tuple[int, int], network: str, message: str, tmp_path, capsys
) -> None:
    """Its suggestion is followed, and works."""
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(8):
            image.new("RGB", size, (100, 30 * k, 0)).save(tmp_path / "images" / name / f"{k}.png")
    command = ["train", "--data", "folder", "--data_dir", str(tmp_path / "images"), "--out", str(tmp_path / "run")]
    command += ["--recipe.epochs", "1", "--model.width", "0.0625", "--recipe.batch_size", "4"]
    command += ["--preset", "cifar10-fast"] if network == "kwlarge" else ["--model.name", network]
    with pytest.raises(SystemExit, match=message) as stop:
        main(command)
    suggested = re.search(r"--resize (\S+)", str(stop.value.code)).group(1)
    main([*command, "--resize", suggested, "--recipe.augment", "false"])
    size_now = json.loads((tmp_path / "run" / "config.json").read_text())["network"]["image_size"]
    assert size_now == (json.loads(suggested) if "[" in suggested else [int(suggested)] * 2)


def test_a_preset_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match=r"preset must be one of cifar10-best, cifar10-fast, .* got 'imagenet'"):
        main(["train", "--preset", "imagenet"])
    assert expand_preset(["evaluate", "--preset", "x"]) == ["evaluate", "--preset", "x"]


# The defaults of a data set


def configured(capsys, *args: str) -> dict[str, Any]:
    """What `orthoconv train` would do."""
    with pytest.raises(SystemExit):
        main(["train", *args, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("data", DATASETS)
def test_the_defaults_of_a_data_set_are_those_of_its_preset(data: str, capsys) -> None:
    config = configured(capsys, "--data", data)
    fields = yaml.safe_load((FOLDER / f"{preset_for(data)}.yaml").read_text())
    for part in ("model", "recipe"):
        assert fields[part].items() <= config[part].items()
    assert (config["data"], config["preset"]) == (data, preset_for(data))
    assert Training.of(config).hash == Training.of({**fields, "data": data}).hash


def test_without_a_data_set_it_is_digits(capsys) -> None:
    assert configured(capsys) == configured(capsys, "--data", "digits") == configured(capsys, "--preset", "digits")


def test_the_recipe_of_the_paper_is_a_preset(capsys) -> None:
    config = configured(capsys, "--preset", "paper", "--data", "cifar10")
    assert Training.of(config).hash == Training.of({"data": "cifar10"}).hash
    assert Training.of(configured(capsys, "--data", "cifar10")).hash != Training.of(config).hash, "the control"


def test_a_network_of_another_kind_comes_without_that_of_the_preset(capsys, tmp_path) -> None:
    named = configured(capsys, "--data", "cifar10", "--model.name", "resnet9")
    assert named["model"] == configured(capsys, "--preset", "paper", "--model.name", "resnet9")["model"]
    assert named["recipe"]["loss"] == "offset_cross_entropy"
    path = tmp_path / "run.yaml"
    path.write_text("data: cifar10\nmodel: {layers: [conv 8 s2, maxmin, flatten, head]}\nrecipe: {lr: 0.5}\n")
    config = configured(capsys, "--config", str(path))
    model = Training.of(config).model
    assert (model.name, model.strided_kernel_size) == ("custom", None)
    assert (config["recipe"]["lr"], config["recipe"]["schedule"]) == (0.5, "linear")
    path.write_text("data: cifar10\npreset: paper\n")
    assert configured(capsys, "--config", str(path))["recipe"]["schedule"] == "triangular"


def test_a_configuration_that_was_printed_is_complete(capsys, tmp_path) -> None:
    path, options = tmp_path / "run.yaml", ["--data", "cifar10", "--recipe.epochs", "3", "--model.conv", "bcop"]
    config = configured(capsys, *options)
    path.write_text(yaml.safe_dump(config))
    assert configured(capsys, "--config", str(path)) == config


def test_a_resumed_run_needs_no_other_options(tmp_path) -> None:
    """What it was trained from is in its folder; it is not the preset of its data set."""
    out = ["train", "--out", str(tmp_path)]
    options = ["--preset", "paper", "--model.width", "0.125", "--recipe.augment", "false", "--recipe.batch_size", "64"]
    main([*out, *options, "--examples", "128", "--recipe.epochs", "1"])
    before = (tmp_path / "config.json").read_text()
    assert "hinge" in before
    main([*out, "--resume", "true"])
    assert json.loads((tmp_path / "config.json").read_text())["recipe"] == json.loads(before)["recipe"]
    with pytest.raises(SystemExit, match=r"is a run with model .*, not .*'width': 0.5"):
        main([*out, "--resume", "true", "--preset", "digits"])


@pytest.mark.slow
def test_all_defaults_learn_the_digits(tmp_path, monkeypatch, capsys) -> None:
    """`orthoconv train`, and no word more: it cropped and flipped digits, and ended at 21.6 %."""
    monkeypatch.chdir(tmp_path)
    main(["train"])
    last = json.loads(Path("runs/train/metrics.jsonl").read_text().splitlines()[-1])
    assert last["test_accuracy"] >= 0.95
    assert last["certified"]["36/255"] >= 0.85
