"""`orthoconv certify`: classes and radii of image files."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from small_runs import encoded, picture, run_folder

from orthoconv import models, predict
from orthoconv.lab.cli import main
from orthoconv.lab.file_arguments import gather_files
from orthoconv.margins import radius_text

NAMES = ["ant", "bee", "cow"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a folder of images, one of which is in a folder of its own."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("place")
    run_folder(place / "run", data="folder", classes=NAMES)
    (place / "images" / "inner").mkdir(parents=True)
    for k in range(3):
        (place / "images" / f"{k}.png").write_bytes(encoded(picture(8, 8, seed=k)))
    (place / "images" / "inner" / "z.PNG").write_bytes(encoded(picture(8, 8, 3, seed=3)))
    (place / "images" / "notes.txt").write_text("not an image")
    (place / "large.jpg").write_bytes(encoded(picture(20, 30, 3), "JPEG"))
    (place / "broken.png").write_bytes(encoded(picture(8, 8))[:50])
    return place


def certify(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Status, output and messages of the command."""
    try:
        main(["certify", *map(str, args)])
        status, message = 0, ""
    except SystemExit as stop:
        status, message = (stop.code, "") if isinstance(stop.code, int) else (1, str(stop.code))
    out, err = capsys.readouterr()
    return status, out, err + message


def test_a_folder_as_json(place: Path, capsys) -> None:
    status, out, err = certify(capsys, place / "run", place / "images", "--format", "json")
    assert (status, err) == (0, "")
    rows, files = json.loads(out), [*(f"{k}.png" for k in range(3)), "inner/z.PNG"]
    assert [row["file"] for row in rows] == [str(place / "images" / f) for f in files]
    model = models.load(place / "run")
    predictions = predict(model, [row["file"] for row in rows])
    for row, one in zip(rows, predictions, strict=True):
        assert row == {
            "file": row["file"],
            "index": one.index,
            "class": NAMES[one.index],
            "margin": one.margin,
            "radius": one.radius,
        }
        assert 0 < row["radius"] < row["margin"]


def test_a_table_and_csv_say_the_same(place: Path, capsys) -> None:
    _, table, _ = certify(capsys, place / "run" / "model.safetensors", place / "images")
    _, text, _ = certify(capsys, place / "run", place / "images", "--format=csv")
    head, *lines, foot = table.splitlines()
    assert head.split() == ["file", "class", "margin", "radius"]
    assert "No image nearer than its radius" in foot
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(lines) == 4
    for row, line in zip(rows, lines, strict=True):
        figures = (f"{float(row['margin']):.4f}", radius_text(float(row["radius"])))
        assert line.split() == [row["file"], row["class"], f"({row['index']})", *figures]


def test_images_of_another_size(place: Path, capsys) -> None:
    status, out, err = certify(capsys, place / "run", place / "large.jpg", place / "images" / "0.png")
    assert status == 1
    assert "large.jpg: the network takes images of 8 x 8 pixels (height x width), got 20 x 30; --resize scales" in err
    assert "1 of 2 images could not be certified" in err
    assert "0.png" in out, "the other one is certified"
    status, out, err = certify(capsys, place / "run", "--resize", place / "large.jpg")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 3


def test_what_is_no_image(place: Path, capsys) -> None:
    wrong = [place / "broken.png", place / "run" / "config.json", place / "nowhere.png"]
    status, out, err = certify(capsys, place / "run", *wrong, "--format", "json")
    assert status == 1
    assert json.loads(out) == []
    for path, why in zip(wrong, ("cannot be read as an image", "not in a format", "does not exist"), strict=True):
        assert any(str(path) in line and why in line for line in err.splitlines()), err
    (place / "empty").mkdir()
    status, _, err = certify(capsys, place / "run", place / "empty")
    assert status == 1
    assert "empty has no images (.bmp" in err
    status, _, err = certify(capsys, place / "run", "-", "-")
    assert "- was given more than once" in err
    status, _, err = certify(capsys, place / "nothing", place / "images")
    assert status == 1
    assert "is neither the folder of a run, nor a .safetensors file, nor one of kwlarge_cayley_cifar10" in err
    status, _, err = certify(capsys, place / "run")
    assert status == 2
    assert "certify.files" in err


def test_the_name_of_a_file_cannot_command_the_terminal(place: Path, capsys) -> None:
    path = place / "evil\x1b[2J.png"
    path.write_bytes(encoded(picture(8, 8)))
    status, out, _ = certify(capsys, place / "run", path)
    assert status == 0
    assert "\x1b" not in out
    path.unlink()


def test_standard_input(place: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(encoded(picture(8, 8, seed=1)))))
    status, out, err = certify(capsys, place / "run", "-", "--format", "json")
    assert (status, err) == (0, "")
    (row,) = json.loads(out)
    (one,) = predict(models.load(place / "run"), place / "images" / "1.png")
    assert (row["file"], row["index"], row["radius"]) == ("-", one.index, one.radius)


def test_arguments_in_any_order() -> None:
    assert gather_files(["certify", "--device", "cpu", "m", "a", "--", "-b.png"])[1:] == [
        *("--device=cpu", "m", '["a", "-b.png"]')
    ]
    assert gather_files(["certify", "m", "--resize", "false", "a"]) == ["certify", "--resize=false", "m", '["a"]']
    assert gather_files(["certify", "--help"]) == ["certify", "--help"]
    assert gather_files(["certify", "m", '[",]']) == ["certify", "m", '["[\\",]"]']


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Not taken for the model, with the model for a file."""
    with pytest.raises(SystemExit):
        main(["certify", "cifar10_best", "a.png", "--nonsense", "3"])
    assert "unrecognized arguments: --nonsense=3" in capsys.readouterr().err
