"""A run opens itself: its folder says everything that is needed to build, compare and export its network."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from orthoconv import certify, data, models
from orthoconv.lab import evaluation, reports
from orthoconv.lab.cli import main
from orthoconv.lab.configs import Training
from orthoconv.lab.runs import Run
from orthoconv.train import CheckpointError, save_weights
from orthoconv.weights import read

SMALL = ("--model.width", "0.25", "--recipe.epochs", "1", "--recipe.augment", "false", "--examples", "256")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    main(["train", "--out", str(folder), "--model.lipschitz", "0.5", "--recipe.batch_size", "64", *SMALL])
    return folder


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def no_data(monkeypatch) -> None:
    """No data set can be loaded."""

    def refuse(*args: object) -> None:
        raise AssertionError("a data set was loaded")

    for name in data.DATASETS:
        monkeypatch.setitem(data.DATASETS, name, refuse)


X = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def edit(folder: Path, **changes: object) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None or k not in changes}))


def test_a_run_and_its_weights_are_loaded_without_data(trained, no_data) -> None:
    model = models.load(trained)
    assert not model.training
    assert model(X).shape == (3, 10)
    assert torch.equal(models.load(str(trained / "model.safetensors"))(X), model(X))
    assert not torch.equal(models.load(trained / "initial.safetensors")(X), model(X)), "the negative control"
    network = json.loads((trained / "config.json").read_text())["network"]
    assert (network["in_channels"], network["image_size"], network["classes"]) == (1, [8, 8], 10)
    assert network["lipschitz"] == 0.5
    assert len(network["mean"]) == 1


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "cifar10_best" else []) for name in models.PRETRAINED],
)
def test_the_shipped_file_can_be_loaded_by_its_path(name: str) -> None:
    path, x = Path(models.__file__).parent / f"{name}.safetensors", torch.rand(2, 3, 32, 32)
    assert torch.equal(models.load(path)(x), models.pretrained(name)(x))


def test_runs_of_version_0_1_0_are_loaded_with_their_data(trained, copy, no_data, monkeypatch) -> None:
    edit(copy, network=None)
    with pytest.raises(AssertionError, match="a data set was loaded"):
        models.load(copy)
    monkeypatch.undo()
    assert torch.equal(models.load(copy)(X), models.load(trained)(X))


def test_what_cannot_be_loaded_is_refused_with_its_path(copy, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'nothing'} does not exist"):
        models.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} is not the folder of a run: it has no config.json"):
        models.load(tmp_path)
    for network, reason in (([1], "does not describe a network"), ({"name": "vgg"}, "name must be one of"), (
        {"name": "kwlarge", "height": 9}, "unexpected keyword argument 'height'"), ("x", "does not describe a network"),
    ):  # fmt: skip
        edit(copy, network=network)
        with pytest.raises(ValueError, match=rf"config\.json .*{reason}"):
            models.load(copy)
    edit(copy, network={"name": "kwlarge"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors is of another architecture"):
        models.load(copy)
    (copy / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        models.load(copy / "model.safetensors")
    save_weights(tmp_path / "plain.safetensors", torch.nn.Linear(2, 2), {})
    with pytest.raises(ValueError, match=r"plain\.safetensors has no network that can be built"):
        models.load(tmp_path / "plain.safetensors")


def test_the_margin_of_a_run_is_that_of_its_network(trained) -> None:
    """`--model.lipschitz 0.5` alone trained with the margin of a network with bound 1."""
    assert json.loads((trained / "config.json").read_text())["recipe"]["lipschitz"] == 0.5


def test_evaluation_report_and_export(copy, monkeypatch, capsys) -> None:
    """Only the evaluation needs images; a report of two runs of one method tells them apart."""
    pytest.importorskip("pyautoattack")
    options = ["--attack_examples", "4", "--apgd_iterations", "2"]
    main(["evaluate", str(copy), *options])
    other = Path(shutil.copytree(copy, copy.with_name("other")))
    edit(other, model={**Run(other).config["model"], "width": 1})
    figures = json.loads((other / "evaluation.json").read_text())
    (other / "evaluation.json").write_text(json.dumps({**figures, "clean": 0.123456}))
    with monkeypatch.context() as patch:
        for name in data.DATASETS:
            patch.setitem(data.DATASETS, name, None)
        main(["report", str(copy), "--compare", f"[{other}]"])
        main(["export", str(copy), "--format", "pt2"])
    page = (copy / "report.html").read_text()
    assert f"<td>cayley, run</td>\n<td>{100 * figures['clean']:.2f} %</td>" in page
    assert "<td>cayley, other</td>\n<td>12.35 %</td>" in page
    assert page.index("cayley, run") < page.index("cayley, other")
    assert (copy / "model.pt2").stat().st_size > 1000


def test_certified_images_may_be_spared(copy, monkeypatch) -> None:
    """Only the others are attacked then, by an attack that always succeeds: it gives images of another class."""
    model, run, test = models.load(copy), Run(copy), data.load("digits")[1].first(100)
    found, attacked = certify(model, data.batches(test, 100), [0.1]), []
    classes = found.logits.argmax(1)

    def replace(model, x, labels=None, *args, **options):
        attacked.append(len(x))
        current = model(x).argmax(1)
        return torch.stack([test.images[classes != c][0] for c in current])

    for name in ("pgd", "apgd"):
        monkeypatch.setattr(evaluation, name, replace)
    options = {"eps": 0.1, "certified_eps": [0.1], "attack_examples": 0}
    figures = evaluation.evaluate_model(model, test, run, attack_certified=False, **options)
    certified = found.radius > 0.1
    assert 0 < certified.sum() < found.correct.sum()
    assert attacked[0] == (found.correct & ~certified).sum()
    assert figures["pgd"] == float(certified.double().mean())
    assert not figures["attacked_certified"]
    with pytest.raises(evaluation.BrokenCertificateError, match=r"certified for eps = 0\.1"):
        evaluation.evaluate_model(model, test, run, **options)


def test_labels_of_runs(trained, tmp_path) -> None:
    runs = [Run(Path(shutil.copytree(trained, tmp_path / name))) for name in ("a/x", "b/x", "c/y")]
    edit(runs[2].folder, model={**runs[2].config["model"], "conv": "bcop"})
    assert reports._labels(runs) == [f"cayley, {tmp_path / 'a/x'}", f"cayley, {tmp_path / 'b/x'}", "bcop"]


def write_images(folder: Path, classes: tuple[str, ...] = ("cat", "dog"), n: int = 10, size: int = 8) -> Path:
    """Images in a folder for each class, of a shade for each class."""
    image = pytest.importorskip("PIL.Image")
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for j in range(n):
            image.new("L", (size, size), 100 * k + j).save(folder / name / f"{j}.png")
    return folder


OWN = ("--recipe.batch_size", "4", "--model.width", "0.125", "--recipe.epochs", "4")
QUICK = ("--attack_examples", "2", "--apgd_iterations", "2")


@pytest.mark.slow
def test_a_run_knows_where_its_data_is(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("pyautoattack")
    for part in ("train", "test"):
        write_images(tmp_path / "images" / part, n=4)
    monkeypatch.chdir(tmp_path)
    folder = ["--data", "folder", "--data_dir", "images", "--recipe.batch_size", "4"]
    main(["train", "--out", "run", *folder, *SMALL])
    monkeypatch.chdir("/")
    main(["evaluate", str(tmp_path / "run"), *QUICK])
    assert "attacks on 2 of 8 test images" in capsys.readouterr().out
    edit(tmp_path / "run", network=None)  # as version 0.1.0 wrote it: opened with its images
    main(["report", str(tmp_path / "run")])
    (tmp_path / "images").rename(tmp_path / "moved")
    for command in (["export", "--format", "pt2"], ["report"], ["verify", "--images", "4"]):
        args = [command[0], str(tmp_path / "run"), *command[1:]]
        with pytest.raises(SystemExit, match=r"a folder of images needs --data_dir, got .*images"):
            main(args)
        main([*args, "--data_dir", str(tmp_path / "moved")])
    with pytest.raises(SystemExit, match="elsewhere"):
        main(["verify", str(tmp_path / "run"), "--data_dir", "/elsewhere"])


@pytest.mark.slow
def test_own_images_keep_their_classes_and_their_division(tmp_path, capsys) -> None:
    """From the configuration to the report; another folder is taken by the names of the classes."""
    pytest.importorskip("pyautoattack")
    images, run = write_images(tmp_path / "images", size=10), tmp_path / "run"
    options = ("--resize", "8", "--split", "0.5", "--data_seed", "3", "--examples", "6", *OWN)
    main(["train", "--data", str(images), "--out", str(run), *options])
    config = json.loads((run / "config.json").read_text())
    assert (config["data"], config["data_dir"], config["classes"]) == ("folder", str(images), ["cat", "dog"])
    assert (config["resize"], config["split"], config["data_seed"]) == ([8, 8], 0.5, 3)
    assert (config["network"]["image_size"], config["network"]["classes"]) == ([8, 8], 2)
    assert Run(run).metrics()[-1]["by_class"].keys() == {"cat", "dog"}
    train, test = Run(run).load_data()
    expected = data.load("folder", images, resize=8, split=0.5, seed=3)
    assert torch.equal(train.images, expected[0].images)
    assert torch.equal(test.images, expected[1].images)
    main(["evaluate", str(run), *QUICK])
    row = json.loads((run / "evaluation.json").read_text())
    assert row["classes"] == ["cat", "dog"]
    shares = [row["by_class"][name] for name in row["classes"]]
    assert [share["examples"] for share in shares] == [5, 5]
    assert sum(share["clean"] for share in shares) / 2 == pytest.approx(row["clean"])
    assert sum(share["certified"] for share in shares) / 2 == pytest.approx(row["certified_at_eps"])
    main(["report", str(run)])
    page = (run / "report.html").read_text()
    assert "<tr><td>dog</td><td>5</td>" in page
    assert re.search(r"class (cat|dog), certified to", page)
    capsys.readouterr()

    main(["evaluate", str(run), *QUICK, "--data_dir", str(write_images(tmp_path / "dogs", ("dog",))), "--split", "1"])
    assert "attacks on 2 of 10 test images" in capsys.readouterr().out
    row = json.loads((run / "evaluation.json").read_text())
    assert row["by_class"]["cat"] == {"examples": 0, "clean": None, "certified": None}
    assert row["by_class"]["dog"]["examples"] == 10, "by its name, though it is the first class of that folder"
    main(["report", str(run)])
    with pytest.raises(SystemExit, match="has the class 'eel', which the training images do not have"):
        main(["evaluate", str(run), "--data_dir", str(write_images(tmp_path / "eels", ("eel",))), "--split", "1"])


def test_a_division_is_part_of_a_run_and_old_digests_stay(tmp_path) -> None:
    plain = Training.of({"data": "folder"})
    assert plain.config.keys() == {"data", "examples", "model", "recipe"}
    others = [{"resize": 16}, {"resize": [16, 8]}, {"split": 0.5}, {"data_seed": 1}, {}]
    assert len({Training.of({"data": "folder", **other}).hash for other in others}) == 5
    same = Training("folder", resize=(16, 16))
    assert same.hash == Training.of({"data": "folder", "resize": 16}).hash
    for bad, message in (({"split": 1}, "split must be between 0 and 1"), ({"data_seed": "x"}, "data_seed must be a")):
        with pytest.raises(ValueError, match=message):
            Training.of({"data": "folder", **bad})
    run = [*("train", "--data", str(write_images(tmp_path / "images")), "--out", str(tmp_path / "run")), *OWN]
    main([*run, "--data_seed", "5"])
    with pytest.raises(SystemExit, match="is a run with data_seed 5, not 6"):
        main([*run, "--resume", "--data_seed", "6"])
    main(["train", "--out", str(tmp_path / "run"), "--resume"])


def test_a_run_starts_from_another_one(trained, tmp_path) -> None:
    """With its weights; a mean with those of a mean, member by member, and nothing with those of another network."""
    layers = ["conv 8 s2", "maxmin", "flatten", "head"]
    small = ["--data", "digits", "--model.layers", json.dumps(layers), "--recipe.epochs", "1", "--examples", "256"]
    first, second = tmp_path / "first", tmp_path / "second"
    main(["train", "--out", str(first), *small, "--model.members", "2", "--threads", "1"])
    main(["train", "--out", str(second), *small, "--model.members", "2", "--threads", "1", "--start", str(first)])
    for k in range(2):
        before, after = (
            read(f / f"member{k}" / f"{n}.safetensors")[0] for f, n in ((first, "model"), (second, "initial"))
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert Run(second).config["start"] == str(first)
    assert Run(second / "member1").config["start"] == f"{first}#1"
    alone = ["train", "--out", str(tmp_path / "alone"), *small, "--start"]
    for start, message in (
        (str(first), "is the mean of 2 networks; start with one of them"),
        (f"{first}#2", "must name one of 2 networks, #0 to #1"),
        (str(trained), "is another network than the one to train"),
        (str(tmp_path / "none"), "is neither the folder of a run"),
    ):
        with pytest.raises(SystemExit, match=message):
            main([*alone, start])


def test_images_that_changed_are_neither_tested_nor_trained_on(tmp_path) -> None:
    """One more image changes the division, so that the new test images may be old training images."""
    images, run = write_images(tmp_path / "images"), tmp_path / "run"
    main(["train", "--data", str(images), "--out", str(run), *OWN])
    train, test = Run(run).load_data()
    first = images / "cat" / "0.png"
    shutil.copy(first, images / "cat" / "11.png")
    both = data.load("folder", images)
    seen = {x.numpy().tobytes() for x in train.images} & {x.numpy().tobytes() for x in both[1].images}
    assert seen, "an image that the network was trained on is a test image now"
    with pytest.raises(data.DataError, match=r"images has other images than when .*run was trained"):
        Run(run).load_data()
    with pytest.raises(SystemExit, match="run was trained on other images than there are now"):
        main(["train", "--out", str(run), "--resume"])
    assert len(Run(run).load_data(split=1)[1].labels) == 21, "all of them, on purpose"
    (images / "cat" / "11.png").unlink()
    assert torch.equal(Run(run).load_data()[1].images, test.images)


def test_a_single_class_is_refused(tmp_path) -> None:
    cats = write_images(tmp_path / "cats", ("cat",))
    with pytest.raises(SystemExit, match=r"cats has 'cat' as its only class; a network tells two or more apart"):
        main(["train", "--data", str(cats), "--out", str(tmp_path / "run"), *OWN])
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("members", ["1", "2"])
def test_a_run_does_not_go_on_with_other_images(tmp_path, members: str) -> None:
    """Its configuration stays what it was."""
    few, many = (str(write_images(tmp_path / f"{n}", n=n)) for n in (10, 30))
    out = ["--out", str(tmp_path / "run"), "--threads", "1"]
    main(["train", "--data", few, *out, *OWN, "--model.members", members, "--recipe.epochs", "1"])
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(SystemExit, match=r"is of a run with 4 steps an epoch, not 12"):
        main(["train", "--resume", "--data_dir", many, *out])
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_run_without_names_of_classes(copy) -> None:
    """As version 0.1.0 wrote it."""
    edit(copy, classes=None)
    assert Run(copy).classes is None
    assert len(Run(copy).load_data()[1].labels) == 500
    edit(copy, classes=[3])
    with pytest.raises(ValueError, match="a name of its classes is no text"):
        Run(copy).load_data()
