import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from orthoconv.data import Split, load
from orthoconv.models import build
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin, SVCMConv2d
from orthoconv.train import (
    CheckpointError,
    Recipe,
    TrainingError,
    fit,
    hinge_loss,
    load_checkpoint,
    load_weights,
    loop,
    offset_cross_entropy,
    piecewise_triangular,
    save_checkpoint,
    save_weights,
)

ROOT = Path(__file__).parents[1]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = CayleyConv2d(1, 8, 3), MaxMin(), CayleyConv2d(8, 8, 4, stride=2), nn.Flatten(), CayleyLinear(128, 10)
    return nn.Sequential(*layers)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_hinge_is_that_of_torch() -> None:
    logits, labels = torch.randn(20, 7, requires_grad=True), torch.randint(7, (20,))
    torch.testing.assert_close(hinge_loss(logits, labels, 0.7), F.multi_margin_loss(logits, labels, margin=0.7))
    assert hinge_loss(10 * F.one_hot(labels, 7).float(), labels, 0.7) == 0


def test_offset_cross_entropy() -> None:
    """By its definition; without offset and with T = 1 it is torch's; a lead beyond the offset costs little."""
    logits, labels = torch.randn(20, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, (20,))
    shifted = (logits - 0.4 * F.one_hot(labels, 7)) / 0.25
    expected = -0.25 * shifted.log_softmax(1)[torch.arange(20), labels].mean()
    torch.testing.assert_close(offset_cross_entropy(logits, labels, 0.4, 0.25), expected)
    torch.testing.assert_close(offset_cross_entropy(logits, labels, 0.0, 1.0), F.cross_entropy(logits, labels))
    assert torch.autograd.gradcheck(lambda y: offset_cross_entropy(y, labels, 0.4, 0.25), logits)
    for lead, least, most in ((3.0, 0.0, 1e-3), (0.4, 0.25, 1.0), (0.0, 0.5, 2.0)):
        assert least < offset_cross_entropy(lead * F.one_hot(labels, 7).double(), labels, 0.4, 0.25) < most
    with pytest.raises(ValueError, match="temperature must be positive and finite, got -1"):
        offset_cross_entropy(logits, labels, 0.4, -1)
    with pytest.raises(ValueError, match="offset must be at least 0 and finite, got nan"):
        offset_cross_entropy(logits, labels, float("nan"))


def test_schedule() -> None:
    assert piecewise_triangular(0.0, 0.1) == 0
    assert piecewise_triangular(0.4, 0.1) == pytest.approx(0.1)
    assert piecewise_triangular(0.8, 0.1) == pytest.approx(0.005)
    assert piecewise_triangular(1.0, 0.1) == pytest.approx(0)
    assert max(piecewise_triangular(k / 1000, 0.1) for k in range(1001)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"lr": -1.0}, "lr must be positive and finite"),
        ({"eps0": float("nan")}, "eps0 must be positive and finite"),
        ({"checkpoint_every": -1}, "checkpoint_every must be at least 0"),
        ({"epochs": 2.5}, "epochs must be at least 1, got 2.5"),
        ({"lr": 10**400}, "lr must be positive and finite"),
        (
            {"loss": "hingo"},
            "loss must be one of 'hinge', 'cross_entropy', 'offset_cross_entropy', .*'emma', .* got 'hingo'",
        ),
        ({"offset": -0.1}, r"offset must be at least 0 and finite, got -0\.1"),
        ({"alpha": 1.5}, r"alpha must be from 0 to 1, got 1\.5"),
        ({"beta": -1}, "beta must be at least 0 and finite, got -1"),
        ({"loss": "vra", "gamma": 2}, "gamma must be from 0 to 1, got 2"),
        ({"eps_rise": "half"}, "eps_rise must be from 0 to 1, got 'half'"),
        ({"temperature": 0}, "temperature must be positive and finite, got 0"),
        ({"augment": "no"}, "augment must be True or False, got 'no'"),
        ({"seed": 2**70}, "seed must be an int of 64 bits"),
    ],
)
def test_recipes_that_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**arguments)


def run(folder: Path, recipe: Recipe, *, stop: int | None = None, resume: bool = False, seed: int = 0) -> nn.Module:
    """Train the small network on digits; with `stop`, as if the process had died after so many steps."""
    model, data = network(seed), load("digits")[0]

    class Died(Exception):  # noqa: N818
        pass

    def on_step(figures) -> None:
        if figures["step"] == stop:
            raise Died

    with contextlib.suppress(Died):
        list(fit(model, data, recipe, folder / "checkpoint", resume=resume, on_step=on_step))
    return model


RECIPE = Recipe(epochs=2, batch_size=128, checkpoint_every=3, seed=1)
OLD_STATE = ("done", "sums", "recipe", "last")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a run that was never stopped."""
    return weights(run(tmp_path_factory.mktemp("whole"), RECIPE))


def test_training_learns(tmp_path) -> None:
    model, (data, test) = network(), load("digits")
    figures = list(fit(model, data, Recipe(epochs=3, batch_size=64, augment=False), tmp_path / "c"))
    assert [f["epoch"] for f in figures] == [1, 2, 3]
    assert figures[-1]["loss"] < figures[0]["loss"] / 2
    accuracy = (model.eval()(test.images).argmax(1) == test.labels).float().mean()
    assert accuracy > 0.85


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, whole) -> None:
    assert not equal(whole, weights(run(tmp_path / "other", RECIPE, seed=5))), "the negative control: another seed"
    for stop in (1, 3, 4, 10, 19):
        run(tmp_path / f"{stop}", RECIPE, stop=stop)
        assert equal(whole, weights(run(tmp_path / f"{stop}", RECIPE, resume=True))), stop


def test_a_checkpoint_is_written_before_the_figures_are_yielded(tmp_path) -> None:
    """A process that dies between the two gets the figures again, and no others twice."""
    (data, _), path = load("digits"), tmp_path / "c"
    whole = [{**f, "seconds": 0} for f in fit(network(), data, RECIPE, tmp_path / "whole")]
    first = next(fit(network(), data, RECIPE, path))
    assert load_weights(path, None)["done"] == first["step"] == 10
    again = list(fit(network(seed=5), data, RECIPE, path, resume=True))
    assert again[0] == first
    assert [{**f, "seconds": 0} for f in again] == whole
    assert list(fit(network(), data, RECIPE, path, resume=True)) == again[-1:]


def test_a_checkpoint_is_a_str_or_a_path(tmp_path) -> None:
    data, _ = load("digits")
    file = tmp_path / "c"
    first = next(fit(network(), data, RECIPE, str(file)))
    assert file.is_file()
    assert next(fit(network(seed=5), data, RECIPE, file, resume=True)) == first
    for wrong in (None, 3):
        with pytest.raises(TypeError, match=f"checkpoint must be a str or a Path, got {wrong}"):
            next(fit(network(), data, RECIPE, wrong))


def test_the_margin_is_that_of_the_bound(tmp_path) -> None:
    """By default that of 1; a run of version 0.1.0, which stored a number, can be resumed."""
    (data, _), step = load("digits"), Recipe(epochs=1, batch_size=1024, augment=False)
    default, one, half = (
        next(fit(network(), data, replace(step, lipschitz=bound), tmp_path / str(bound)))["loss"]
        for bound in (None, 1.0, 0.5)
    )
    assert default == one > half
    list(fit(network(), data, step, tmp_path / "1.0", resume=True))


def test_a_run_is_resumed_with_its_own_recipe(tmp_path) -> None:
    run(tmp_path, RECIPE, stop=5)
    with pytest.raises(CheckpointError, match=r"is of a run with lr=0\.01, not 0\.02"):
        run(tmp_path, Recipe(epochs=2, batch_size=128, lr=0.02, seed=1), resume=True)


def test_a_run_is_resumed_with_its_own_data(tmp_path) -> None:
    """With half as many images, it took the steps that were done for twice as many epochs, and ended early."""
    (data, _), path = load("digits"), tmp_path / "checkpoint"
    run(tmp_path, RECIPE, stop=5)
    half = Split(data.images[:640], data.labels[:640])
    with pytest.raises(CheckpointError, match=r"checkpoint is of a run with 10 steps an epoch, not 5; .* the data it"):
        list(fit(network(), half, RECIPE, path, resume=True))


def test_a_checkpoint_without_the_steps_of_an_epoch_is_resumed(tmp_path, whole, monkeypatch) -> None:
    with monkeypatch.context() as m:  # a checkpoint of an older version
        save = loop.save_checkpoint
        m.setattr(loop, "save_checkpoint", lambda *args: save(*args[:3], {k: args[3][k] for k in OLD_STATE}))
        run(tmp_path, RECIPE, stop=5)
    assert "steps" not in load_weights(tmp_path / "checkpoint", None)
    assert equal(whole, weights(run(tmp_path, RECIPE, resume=True)))


def test_a_run_of_a_version_without_the_constants_of_a_loss_is_resumed(tmp_path, whole, monkeypatch) -> None:
    with monkeypatch.context() as m:  # a checkpoint as it was before there were an offset and a temperature
        old = {k: v for k, v in asdict(replace(RECIPE, lipschitz=1.0)).items() if k not in ("offset", "temperature")}
        m.setattr(loop, "asdict", lambda recipe: old)
        run(tmp_path, RECIPE, stop=5)
    assert "offset" not in load_weights(tmp_path / "checkpoint", None)["recipe"]
    assert equal(whole, weights(run(tmp_path, RECIPE, resume=True)))


def test_the_constants_of_a_loss_belong_to_a_run_that_uses_them(tmp_path) -> None:
    used = replace(RECIPE, loss="offset_cross_entropy")
    assert {"offset", "temperature"} <= used.settings.keys()
    assert replace(RECIPE, offset=0.7).settings == RECIPE.settings
    run(tmp_path, used, stop=5)
    with pytest.raises(CheckpointError, match=r"is of a run with offset=0\.4, not 0\.7"):
        run(tmp_path, replace(used, offset=0.7), resume=True)


def test_non_finite_loss_stops_before_the_weights_are_spoiled(tmp_path) -> None:
    model, (data, _) = network(), load("digits")
    images = data.images.clone()
    images[700] = float("nan")
    with pytest.raises(TrainingError, match=r"step \d+: the loss is nan; the largest gradient is that of .*checkpoint"):
        list(fit(model, Split(images, data.labels), Recipe(epochs=1, batch_size=64), tmp_path / "c"))
    assert all(v.isfinite().all() for v in model.state_dict().values())


def test_batches_that_do_not_fit(tmp_path) -> None:
    model, (data, _) = network(), load("digits")
    with pytest.raises(ValueError, match="batch_size must be at most 1297"):
        list(fit(model, data, Recipe(batch_size=2000), tmp_path / "c"))


def test_svcm_layers_are_projected(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SVCMConv2d(1, 8, 1), nn.Flatten(), nn.Linear(512, 10))
    data, _ = load("digits")
    list(fit(model, data, Recipe(epochs=1, batch_size=128), tmp_path / "c"))
    assert (model[0].singular_values((8, 8)) - 1).abs().max() < 1e-5


def test_checkpoints_give_everything_back(tmp_path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c", model, optimizer, {"done": 7})
    expected = torch.rand(3)
    other = network(seed=3)
    second = torch.optim.Adam(other.parameters(), lr=0.5)
    assert load_checkpoint(tmp_path / "c", other, second) == {"done": 7}
    assert torch.equal(torch.rand(3), expected), "the state of the random numbers"
    assert equal(weights(model), weights(other))
    assert second.param_groups[0]["lr"] == 0.1
    for a, b in zip(optimizer.state.values(), second.state.values(), strict=True):
        assert equal(dict(a), dict(b))


def test_damaged_checkpoints_are_refused_with_path_and_reason(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(path, network(), {"a": 1})
    data = path.read_bytes()
    assert load_weights(path, network(seed=3)) == {"a": 1}
    for k in (10, 200, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:k])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            load_weights(path, network())
    for k in range(len(data) - 900, len(data), 97):
        path.write_bytes(data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :])
        with pytest.raises(CheckpointError, match="digest"):
            load_weights(path, network())
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(path, network())
    with pytest.raises(CheckpointError, match="does not exist"):
        load_weights(tmp_path / "nothing", network())


def test_a_checkpoint_of_another_architecture(tmp_path) -> None:
    path = tmp_path / "c"
    save_weights(path, build("kwlarge", width=0.25, image_size=8, in_channels=1), {})
    with pytest.raises(CheckpointError, match=r"another architecture; \d+ tensors differ, the first is \d\.weight: \("):
        load_weights(path, network())


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch) -> None:
    path, model = tmp_path / "c", network()
    save_weights(path, model, {"a": 1})
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left.*unchanged"):
        save_weights(path, network(seed=1), {"a": 2})
    assert load_weights(path, network()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


COMMAND = [
    *("train", "--model.width", "0.25", "--recipe.batch_size", "64", "--recipe.epochs", "3", "--threads", "1"),
    *("--recipe.checkpoint_every", "2", "--out"),
]


def orthoconv(*args: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orthoconv", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **options)


@pytest.mark.slow
def test_two_processes_follow_one(tmp_path) -> None:
    """torchrun with two ranks and the same global batch: the losses agree, and only one writes."""
    single = orthoconv(*COMMAND, tmp_path / "one")
    _, err = single.communicate(timeout=300)
    assert single.returncode == 0, err
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    both = subprocess.run(
        [*command, "-m", "orthoconv", *COMMAND, str(tmp_path / "two")], capture_output=True, text=True, cwd=ROOT
    )
    assert both.returncode == 0, both.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / k / "metrics.jsonl").read_text().splitlines()] for k in ("one", "two")
    )
    assert len(one) == len(two) == 3
    assert abs(one[0]["loss"] - two[0]["loss"]) < 1e-4, "the mean over the first 20 steps"
    assert two[0]["test_accuracy"] == pytest.approx(one[0]["test_accuracy"], abs=0.02)


def test_a_layer_that_stands_in_two_places_is_saved_and_resumed(tmp_path) -> None:
    def twice() -> nn.Sequential:
        torch.manual_seed(0)
        layer = CayleyLinear(64, 64)
        return nn.Sequential(nn.Flatten(), layer, MaxMin(), layer, CayleyLinear(64, 10))

    data, recipe = load("digits")[0].first(64), Recipe(epochs=2, batch_size=32, augment=False)
    whole, stopped = twice(), twice()
    list(fit(whole, data, recipe, tmp_path / "whole"))
    next(fit(stopped, data, recipe, tmp_path / "stopped"))
    resumed = twice()
    list(fit(resumed, data, recipe, tmp_path / "stopped", resume=True))
    assert resumed[1] is resumed[3]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
