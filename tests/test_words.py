"""Networks as lists of words, and the networks of other papers that are written so."""

import json

import pytest
import torch
from torch import nn

from orthoconv import certify, lipschitz_bound, models
from orthoconv.lab.cli import main
from orthoconv.lab.configs import ModelSpec, Training
from orthoconv.models import build
from orthoconv.models.words import LAYERS, Kind, count_layers
from orthoconv.nn import CayleyConv2d, CayleyLinear, GroupSort, MaxMin, NormalizedLinear, RKOConv2d, Scale

WORDS = ["conv 8 k3", "maxmin", "conv 16 k4 s2 rko", "groupsort 4", "pool 2", "flatten", "linear 12", "relu", "head"]


def test_each_word_makes_its_layer() -> None:
    model = build([*WORDS[:-1], "head normalized"], in_channels=1, image_size=(8, 16), classes=3)
    kinds = [CayleyConv2d, MaxMin, RKOConv2d, GroupSort, None, nn.Flatten, CayleyLinear, nn.ReLU, NormalizedLinear]
    assert all(kind is None or type(layer) is kind for kind, layer in zip(kinds, model, strict=True))
    assert model[2].geometry.kernel_size == (4, 4)
    assert model[6].in_features == 16 * 2 * 4
    assert model[8].out_features == 3
    assert model(torch.rand(2, 1, 8, 16)).shape == (2, 3)
    assert count_layers(WORDS) == 4


def test_the_width_and_the_kernel_are_those_of_the_network() -> None:
    model = build(WORDS, "aol", width=0.5, kernel_size=5, image_size=8)
    assert model[0].geometry.kernel_size == (3, 3)
    assert build(["conv 8", "flatten", "head"], kernel_size=5)[0].geometry.kernel_size == (5, 5)
    assert [model[k].geometry.out_channels for k in (0, 2)] == [4, 8]
    assert model[6].out_features == 6


def test_the_bound_is_shared_by_the_layers() -> None:
    model = build(WORDS, image_size=8, lipschitz=0.5)
    scales = [m.factor for m in model if isinstance(m, Scale)]
    assert scales == pytest.approx([0.5**0.25] * 4)
    assert 0.3 < lipschitz_bound(model, (3, 8, 8)) < 0.5 * (1 + 1e-5)
    x = torch.rand(4, 3, 8, 8)
    assert certify(model, [(x, model(x).argmax(1))]).radius.max() > 0


def test_a_new_layer_is_one_line(monkeypatch) -> None:
    """Its output shape is found by running it."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : x.shape[1] // 2]

    monkeypatch.setitem(LAYERS, "halves", Kind(lambda shape: Halves()))
    model = build(["conv 8", "halves", "flatten", "head"], image_size=4)
    assert model[-1].in_features == 64
    assert model[1].training


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["conv 8", "mixmax", "head"], "a layer is one of 'conv .*', 'linear .*'groupsort SIZE'.*, got 'mixmax'"),
        (["conv", "head"], "is 'conv CHANNELS .*', got 'conv'"),
        (["conv 8 16", "flatten", "head"], "is 'conv CHANNELS .*', got 'conv 8 16'"),
        (["conv 8 k0", "flatten", "head"], "is 'conv CHANNELS .*', got 'conv 8 k0'"),
        (["pool 0", "flatten", "head"], "is 'pool SIDE' with positive numbers, got 'pool 0'"),
        (["downsample 0", "flatten", "head"], "is 'downsample STRIDE' with positive numbers, got 'downsample 0'"),
        (["shuffle 0", "flatten", "head"], "is 'shuffle GROUPS' with positive numbers, got 'shuffle 0'"),
        (["conv 0", "flatten", "head"], "is 'conv .*' with positive numbers, got 'conv 0'"),
        (["conv 8 p1", "flatten", "head"], "layer 0, 'conv 8 p1', cannot .* conv must be one of .* got 'p1'"),
        (["conv 8 qr", "flatten", "head"], "layer 0, 'conv 8 qr', cannot .* conv must be one of .* got 'qr'"),
        (["conv 8 -3", "flatten", "head"], "got 'conv 8 -3'"),
        (["flatten", "linear 8 k3", "head"], r"is 'linear FEATURES \[METHOD\]', got 'linear 8 k3'"),
        (["conv 8", "groupsort", "flatten", "head"], "is 'groupsort SIZE', got 'groupsort'"),
        (["conv 8", "head"], r"layer 1, 'head', cannot follow .* shape \(8, 8, 8\): it takes vectors; 'flatten'"),
        (["flatten", "conv 8", "flatten", "head"], r"'conv 8', cannot follow .* shape \(192,\): it takes images"),
        (["flatten", "flatten", "head"], "layer 1, 'flatten', cannot .* it takes images"),
        (["conv 8 s3", "flatten", "head"], "the stride 3 does not divide the image"),
        (["pool 3", "flatten", "head"], "layer 0, 'pool 3', .* whose sides"),
        (["maxmin", "flatten", "head"], r"layer 0, 'maxmin', cannot follow .* shape \(3, 8, 8\): .* 2 divides"),
        (["conv 7", "flatten", "head"], "an even number"),
        (["conv 8", "flatten"], "one head, which comes last"),
        (["flatten", "head", "maxmin"], "one head, which comes last"),
        ([], "one head, which comes last"),
        ([3], "a layer is one of .* got 3"),
        ([""], "a layer is one of .* got ''"),
    ],
)  # fmt: skip
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(words, image_size=8)


def test_a_list_needs_no_name() -> None:
    with pytest.raises(ValueError, match=r"layers must be a list, .* got None"):
        build("custom")
    with pytest.raises(ValueError, match=r"layers must be a list, .* got 'head'"):
        build("custom", layers="head")
    with pytest.raises(ValueError, match="given by its layers has no depth, got 5"):
        build(["flatten", "head"], depth=5)
    with pytest.raises(ValueError, match=r"name must be one of 'kwlarge', .* or 'custom' with layers, got 'vgg'"):
        build("vgg")


# Networks of other papers


@pytest.mark.parametrize("depth", [None, 10, 15])
def test_lipconvnet(depth: int | None) -> None:
    model = build("lipconvnet", width=0.25, depth=depth)
    convs = [m.geometry for m in model if isinstance(m, CayleyConv2d)]
    per_block = (depth or 5) // 5
    assert len(convs) == 5 * per_block
    ends = convs[per_block - 1 :: per_block]
    assert [g.out_channels for g in ends] == [16, 32, 64, 128, 256]
    assert [g.in_channels for g in ends] == [4 * c for c in (8 if depth else 3, 16, 32, 64, 128)]
    assert [g.kernel_size[0] for g in convs[-per_block:]] == [1] * per_block
    assert model[-1].in_features == 256
    bound = lipschitz_bound(build("lipconvnet", width=0.125, depth=depth, lipschitz=2), (3, 32, 32))
    assert bound == pytest.approx(2, rel=2e-5)


def test_liresnet() -> None:
    model = build("liresnet", "cayley", width=0.25, depth=2)
    convs = [m.geometry for m in model if isinstance(m, CayleyConv2d)]
    assert [(g.out_channels, g.kernel_size[0], g.stride[0]) for g in convs] == [
        (16, 5, 2), (16, 3, 1), (16, 3, 1), (32, 4, 4),
    ]  # fmt: skip
    assert [m.out_features for m in model if isinstance(m, CayleyLinear)] == [128, 128, 10]
    kind = type(build("liresnet", width=0.125)[2])
    known = "lires" in models.networks.conv_methods()
    assert (kind is CayleyConv2d) != known


# Configurations


def test_a_configuration_has_layers() -> None:
    spec = ModelSpec(layers=["conv 8", "maxmin", "flatten", "head"])
    assert spec.name == "custom"
    assert spec.conv == "cayley"
    same = Training.of({"data": "digits", "model": {"name": "custom", "layers": spec.layers}})
    assert same.hash == Training("digits", spec).hash
    assert same.hash != Training.of({"data": "digits", "model": {"layers": ["conv 8", "flatten", "head"]}}).hash
    with pytest.raises(ValueError, match="layers are given, so name must be 'custom' or left out, got 'resnet9'"):
        ModelSpec(name="resnet9", layers=["flatten", "head"])


def test_depth_and_layers_do_not_change_an_old_digest() -> None:
    plain = Training.of({"data": "digits"})
    assert plain.hash == "cfdd424a630e3ac8"
    assert plain.config["model"].keys().isdisjoint({"depth", "layers"})
    deep = [Training.of({"data": "digits32", "model": {"name": "lipconvnet", "depth": d}}) for d in (None, 10)]
    assert deep[0].hash != deep[1].hash
    assert deep[1].config["model"]["depth"] == 10


def test_a_list_on_the_command_line(tmp_path) -> None:
    run = tmp_path / "run"
    words = "[conv 8 k3 s2, maxmin, flatten, linear 32, maxmin, head normalized]"
    main(["train", "--out", str(run), "--model.layers", words, "--recipe.epochs", "1", "--recipe.augment", "false"])
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["name"] == "custom"
    model = models.load(run)
    assert isinstance(model[-1], NormalizedLinear)
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("word", LAYERS)
def test_every_word_makes_a_layer_that_certificates_know(word: str) -> None:
    line = " ".join((word, *("2" for _ in LAYERS[word].numbers)))
    flat = [] if word == "flatten" else ["flatten"]
    model = build(["conv 8 k3 s2", line, *flat, "head"], image_size=8, in_channels=1).eval()
    assert lipschitz_bound(model, (1, 8, 8)) == pytest.approx(1, abs=1e-5)
