"""The mean of several models: what it computes, its bounds, and certificates that hold under attack."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certify, export, in_double, lipschitz_bound, models, predict, rounding_bound, to_onnx, verify
from orthoconv.attacks import cross_examine
from orthoconv.certificates.heads import pairwise_rates
from orthoconv.data import batches, load
from orthoconv.lab.cli import main
from orthoconv.lab.configs import Training
from orthoconv.lab.locks import locked
from orthoconv.lab.runs import Run
from orthoconv.lab.training import parts_of
from orthoconv.nn import CayleyLinear, Ensemble, IsometryAverage, MaxMin, NormalizedLinear, Scale
from orthoconv.train import Recipe, fit

WORDS = ["conv 4 k3 s2", "maxmin", "flatten", "linear 16", "maxmin", "head normalized"]


def member(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return models.build(WORDS, in_channels=1, image_size=8, mean=[0.3])


def one(body: nn.Module) -> float:
    return 1.0


def linear(rows: Tensor) -> nn.Linear:
    layer = nn.Linear(rows.shape[1], rows.shape[0], dtype=rows.dtype)
    layer.weight.data.copy_(rows)
    return layer


def test_it_is_the_mean() -> None:
    members, x = [member(k).double() for k in range(3)], torch.rand(5, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(Ensemble(members)(x), sum(m(x) for m in members) / 3)
    kept = x.clone()
    in_place = Ensemble([nn.ReLU(inplace=True), nn.Identity()])
    torch.testing.assert_close(in_place(x - 0.5), ((x - 0.5).relu() + x - 0.5) / 2)
    assert torch.equal(x, kept)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="one model or more, got none"):
        Ensemble([])
    with pytest.raises(ValueError, match="members must be modules, got 'kwlarge'"):
        Ensemble([nn.Identity(), "kwlarge"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"return one shape, got \(2, 3\) and \(2, 4\)"):
        Ensemble([nn.Linear(5, 3), nn.Linear(5, 4)])(torch.rand(2, 5))


@torch.no_grad()
def test_bounds_are_means() -> None:
    uneven = Ensemble([nn.Sequential(CayleyLinear(6, 6), Scale(c)) for c in (0.5, 2.0, 5.0)])
    assert lipschitz_bound(uneven, (6,)) == pytest.approx(2.5, rel=1e-5)
    model, x = Ensemble([member(k) for k in range(3)]).eval(), torch.rand(40, 1, 8, 8)
    error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
    assert float(error.max()) > 0
    assert (error <= rounding_bound(model, (1, 8, 8), 8.0)).all()
    assert verify(model, x[:8]).faults == []


@torch.no_grad()
def test_rates_of_linear_members_are_means_of_distances() -> None:
    torch.manual_seed(0)
    W, V = torch.randn(2, 4, 7, dtype=torch.float64)
    expected = (torch.cdist(W, W) + 3 * torch.cdist(V, V)) / 2
    pair = Ensemble([linear(W), nn.Sequential(linear(V), Scale(-3.0))])
    rates = pairwise_rates(pair, one)
    assert rates is not None
    torch.testing.assert_close(rates, expected, rtol=1e-12, atol=1e-12)
    assert (rates >= expected * (1 - 1e-14)).all()
    twice = pairwise_rates(nn.Sequential(nn.Identity(), pair, Scale(2.0)), one)
    torch.testing.assert_close(twice, 2 * expected, rtol=1e-12, atol=1e-12)
    nested = pairwise_rates(Ensemble([pair, linear(W)]), one)  # each half of the outer mean
    torch.testing.assert_close(nested, (expected + torch.cdist(W, W)) / 2, rtol=1e-12, atol=1e-12)
    assert pairwise_rates(Ensemble([linear(W), nn.ReLU()]), one) is None
    assert pairwise_rates(nn.Sequential(pair, nn.ReLU()), one) is None


@torch.no_grad()
def test_radii_of_linear_members_stay_within_the_distance_to_the_boundary() -> None:
    torch.manual_seed(0)
    members = [NormalizedLinear(9, 4, dtype=torch.float64) for _ in range(3)]
    model, x = Ensemble(members).eval(), torch.randn(50, 9, dtype=torch.float64)
    y, W = model(x), torch.stack([m.cached_operator() for m in members]).mean(0)
    labels = y.argmax(1)
    exact = ((y.gather(1, labels[:, None]) - y) / (W[labels][:, None] - W).norm(dim=2)).nan_to_num(torch.inf).amin(1)
    found = certify(model, [(x, labels)])
    assert found.head == "pairwise"
    assert (found.radius <= exact).all()
    assert (found.radius > 0).all()


@torch.no_grad()
def test_radii_are_at_least_the_mean_of_the_members() -> None:
    """Members with the same distances of rows; where a class is wrong, its radius counts as below zero."""
    torch.manual_seed(0)
    members = [nn.Sequential(CayleyLinear(8, 8), MaxMin(), CayleyLinear(8, 4)).double().eval() for _ in range(3)]
    x = torch.randn(200, 8, dtype=torch.float64)
    ensemble = Ensemble(members).eval()
    labels = ensemble(x).argmax(1)
    radii = torch.stack([certify(m, [(x, labels)]).radius for m in members])
    all_right = (radii > 0).all(0)
    assert 5 < int(all_right.sum()) < 200
    mean = radii.mean(0)[all_right]
    assert (certify(ensemble, [(x, labels)]).radius[all_right] >= mean * (1 - 1e-9)).all()


@torch.no_grad()
def test_the_mirror_image_of_an_ensemble() -> None:
    members, x = [member(k).eval() for k in range(2)], torch.rand(20, 1, 8, 8)
    outside, inside = IsometryAverage(Ensemble(members)).eval(), Ensemble(map(IsometryAverage, members)).eval()
    labels = outside(x).argmax(1)
    found = [certify(model, [(x, labels)]) for model in (outside, inside)]
    assert found[0].head == found[1].head == "pairwise"
    torch.testing.assert_close(found[0].radius, found[1].radius, rtol=1e-4, atol=1e-5)


def test_a_network_of_several_members() -> None:
    model = models.build(WORDS, in_channels=1, image_size=8, members=2, mirror=True)
    (average,) = model
    assert isinstance(average, IsometryAverage)
    assert isinstance(average.f, Ensemble)
    first, second = average.f.members
    assert not torch.equal(first[0].weight, second[0].weight)
    assert isinstance(models.build(WORDS, in_channels=1, image_size=8, mirror=True)[0], IsometryAverage)
    with pytest.raises(ValueError, match="members must be a positive int, got 0"):
        models.build(WORDS, image_size=8, members=0)
    with pytest.raises(ValueError, match="mirror must be True or False, got 1"):
        models.build(WORDS, image_size=8, mirror=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_export() -> None:
    model, x = Ensemble([member(0), member(1)]).eval(), torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(export(model, (1, 8, 8))(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnx(tmp_path) -> None:
    model, x = Ensemble([member(0), member(1)]).eval(), torch.rand(3, 1, 8, 8)
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    to_onnx(model, x, tmp_path / "model.onnx", certificate=True)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    y, _ = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_it_is_better_than_its_members_and_nothing_is_broken(tmp_path) -> None:
    pytest.importorskip("pyautoattack")
    training, test = load("digits")
    members = [member(k) for k in range(3)]
    for k, model in enumerate(members):
        recipe = Recipe(epochs=3, batch_size=64, loss="offset_cross_entropy", augment=False, seed=k)
        assert len(list(fit(model, training, recipe, tmp_path / f"{k}"))) == 3
    ensemble = Ensemble(members).eval().requires_grad_(False)
    x, labels = test.images, test.labels
    found = certify(ensemble, [(x, labels)])
    share = (found.radius > 36 / 255).double().mean()
    assert share > max(float((certify(m, [(x, labels)]).radius > 36 / 255).double().mean()) for m in members)
    assert predict(ensemble, x[:1]).index.shape == (1,)
    assert not cross_examine(ensemble, x[:100], labels[:100], found.radius[:100], iterations=10, restarts=1).any()
    assert cross_examine(ensemble, x[:100], labels[:100], 4 * found.radius[:100], iterations=10, restarts=1).any()


def test_a_run_of_several_members(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    small = ["--recipe.epochs", "1", "--model.width", "0.125", "--examples", "128", "--recipe.batch_size", "32"]
    command = ["train", "--data", "digits", *small, "--recipe.seed", "5", "--out", str(out)]
    main([*command, "--model.members", "2", "--model.mirror", "true"])
    assert "member1: seed 6" in capsys.readouterr().out
    whole, parts = models.load(out), [models.load(out / f"member{k}") for k in range(2)]
    x = load("digits")[1].images[:20]
    torch.testing.assert_close(whole(x), IsometryAverage(Ensemble(parts)).eval()(x))
    assert [Run(out / f"member{k}").training.recipe.seed for k in range(2)] == [5, 6]
    *epochs, last = Run(out).metrics()
    assert [(m["epoch"], m["member"]) for m in epochs] == [(1, 0), (2, 1)]
    certified = certify(whole, batches(load("digits")[1], 500), rounding=False)
    assert last["test_accuracy"] == pytest.approx(certified.clean_accuracy)
    assert last["certified"]["36/255"] == pytest.approx(certified.certified_accuracy[36 / 255])
    with pytest.raises(SystemExit, match="has a run already"):
        main([*command, "--model.members", "2"])

    main(["train", "--data", "digits", *small, "--recipe.seed", "7", "--out", str(out / "member2")])  # one more
    main([*command, "--model.members", "3", "--resume"])
    assert len(models.load(out)[0].f.members) == 3


def test_a_run_that_stops_in_its_first_member_knows_what_it_is(tmp_path, monkeypatch) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr("orthoconv.lab.training._train_one", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit):
        main(["train", "--data", "digits", "--model.members", "2", "--recipe.seed", "5", "--out", str(out)])
    assert [part.recipe.seed for part in parts_of(Run(out).training)] == [5, 6]


_SMALL = ["--recipe.epochs", "1", "--model.width", "0.125", "--examples", "128", "--recipe.batch_size", "32"]
_SMALL += ["--threads", "1", "--data", "digits"]


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(message: str, command: list[str], out: Path) -> None:
    """The command says so, and every file stays what it was."""
    before = contents(out)
    with pytest.raises(SystemExit, match=message):
        main([*command, "--out", str(out)])
    assert contents(out) == before


def test_a_resume_that_is_refused_writes_nothing(tmp_path) -> None:
    single, mean, parts = (tmp_path / name for name in ("single", "mean", "parts"))
    main(["train", *_SMALL, "--out", str(single)])
    main(["train", *_SMALL, "--model.members", "2", "--out", str(mean)])
    resume = ["train", "--resume", "--threads", "1"]
    for mirror in (["--model.width", "0.25"], []):
        refused("single is a run with model", [*resume, "--model.mirror", "true", *mirror], single)
    refused("single is a run with model", [*resume, "--model.members", "2"], single)
    refused("mean is of a run with lr=.*, not 0.5; a run is resumed", [*resume, "--recipe.lr", "0.5"], mean)
    for options in (["--model.width", "0.25"], ["--model.members", "1"], ["--model.mirror", "true"]):
        refused("mean is a run with model", [*resume, *options], mean)
    refused("mean is a run with examples 128, not 96", [*resume, "--examples", "96"], mean)

    for k in range(2):  # two folders of members, and no configuration of the whole
        shutil.copytree(mean / f"member{k}", parts / f"member{k}")
    other = ["train", *_SMALL, "--resume", "--model.members", "2", "--recipe.lr", "0.5"]
    refused("member0 is of a run with lr=.*, not 0.5", other, parts)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path) -> None:
    for members in ("1", "2"):
        command = ["train", *_SMALL, "--model.members", members]
        refused("batch_size must be at most 128, the number of .*, got 129", [*command, "--recipe.batch_size", "129"],
                tmp_path / "run")  # fmt: skip
        refused("--resize 8 makes them fit", [*command, "--resize", "9"], tmp_path / "run")
        refused("bad", [*command, "--model.layers", "[bad, flatten, head]"], tmp_path / "run")


def test_a_mean_whose_members_have_not_begun_can_start_again(tmp_path, monkeypatch) -> None:
    command = ["train", *_SMALL, "--model.members", "2", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr("orthoconv.lab.training._train_one", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(SystemExit):
            main(command)
    main(command)
    assert len(Run(tmp_path).metrics()) == 3
    (tmp_path / "metrics.jsonl").unlink()
    refused("member0 has a run already", command[:-2], tmp_path)


def test_a_member_that_another_process_trains_is_left_alone(tmp_path) -> None:
    with locked(tmp_path / "member1"):
        refused("member1 is in use by process", ["train", *_SMALL, "--model.members", "2"], tmp_path)
        assert not (tmp_path / "config.json").exists()
    main(["train", *_SMALL, "--model.members", "2", "--out", str(tmp_path)])
    assert not list(tmp_path.rglob("lock"))


def test_older_configurations_have_one_member() -> None:
    one, several = Training.of({"data": "digits"}), Training.of({"data": "digits", "model": {"members": 2}})
    assert "members" not in one.config["model"]
    assert parts_of(one) == [one]
    assert one.hash != several.hash
    assert parts_of(several)[0] == one
