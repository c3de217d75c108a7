"""What a line of a network may say besides its numbers: options of its layer, residuals, and words of this version."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from orthoconv import lipschitz_bound, models
from orthoconv.lab.cli import main
from orthoconv.lab.configs import ModelSpec, Training
from orthoconv.models import build
from orthoconv.models.words import LAYERS, count_layers, divisor_of
from orthoconv.nn import (
    Abs,
    BatchCentering,
    ConvexResidual,
    InvertibleUpsample,
    L2Pool2d,
    LayerCentering,
    LPReLU,
    MaxMin,
    NActivation,
    Scale,
    ScaledAdaptiveAvgPool2d,
    SoftHuber,
    methods,
    register_method,
)
from orthoconv.testing import dense_matrix

# Options


@pytest.mark.parametrize(
    ("line", "conv", "attributes"),
    [
        ("conv 8 k3 g2", "cayley", {"groups": 2}),
        ("conv 8 k3 d2", "cayley", {"dilation": (2, 2)}),
        ("conv 8 g2 k3 s2 lot d1", "cayley", {"groups": 2, "stride": (2, 2), "kernel_size": (3, 3)}),
        ("conv 8 kernel_size=5 stride=2 groups=2", "cayley", {"kernel_size": (5, 5), "stride": (2, 2), "groups": 2}),
        ("conv 8 bias=false", "cayley", {"bias": None}),
        ("conv 8 padding_mode=zeros", "cayley", {"padding_mode": "zeros"}),
        ("conv 8 padding=1 k3", "cayley", {"padding": (1, 1)}),
        ("conv 8 identity=true", "cayley", {"identity": True}),
        ("conv 8 identity=false", "aol", {"identity": False}),
        ("conv 8 aol steps=3", "cayley", {"steps": 3}),
        ("conv 8 bro rank=2", "cayley", {"rank": 2}),
        ("conv 8 bro rank=null", "cayley", {"rank": 2}),
        ("conv 8 hidden=6", "cpl", {"hidden": 6}),
        ("conv 8 lires depth=12 gain=5e-1", "cayley", {"depth": 12, "initial_gain": 0.5}),
        ("conv 8 svcm mode=clip", "cayley", {"mode": "clip"}),
        ("conv 8 crko identity=true", "cayley", {"identity": True, "orthogonalizer": "cayley"}),
    ],
)
def test_a_convolution_gets_the_options_of_its_line(line: str, conv: str, attributes: dict[str, Any]) -> None:
    layer = build([line, "flatten", "head"], conv, in_channels=4, image_size=8)[0]
    assert {name: getattr(layer, name) for name in attributes} == attributes


def test_linear_layers_and_the_head_get_theirs() -> None:
    words = [
        "flatten",
        "linear 16 bro rank=3",
        "maxmin",
        "linear 16 identity=true bias=no",
        "head normalized bias=false",
    ]
    model = build(words, in_channels=1, image_size=4).double()
    assert model[1].rank == 3
    torch.testing.assert_close(dense_matrix(model[3], (16,)), torch.eye(16, dtype=torch.float64))
    assert model[4].bias is None
    assert build(["flatten", "linear 8 plain bias=false", "head"], image_size=4)[1].bias is None


def test_other_words_get_theirs() -> None:
    words = [
        "conv 8", "centre momentum=0.5 bias=false", "nactivation reach=2", "lprelu slope=-0.5", "softhuber delta=3",
        "abs fraction=0.25", "flatten", "head",
    ]  # fmt: skip
    _, centre, nactivation, lprelu, softhuber, fraction, *_ = build(words, image_size=4)
    assert isinstance(centre, BatchCentering)
    assert (centre.momentum, centre.bias) == (0.5, None)
    assert isinstance(nactivation, NActivation)
    assert nactivation.corners.min() == -2
    assert isinstance(lprelu, LPReLU)
    assert lprelu.slope.tolist() == [-0.5] * 8
    assert isinstance(softhuber, SoftHuber)
    assert softhuber.delta == 3
    assert isinstance(fraction, Abs)
    assert fraction.fraction == 0.25


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "conv 8 rank=8",
            "'conv 8 rank=8', .* rank=8 is no option .* of 'cayley'; those of CayleyConv2d are .*, signs, ",
        ),
        ("conv 8 bro rank=x", "'conv 8 bro rank=x', .* rank must be a positive int, got 'x'"),
        ("conv 8 bias=maybe", "'conv 8 bias=maybe', .* bias of CayleyConv2d must be true or false, got 'maybe'"),
        ("conv 8 dtype=float64", "dtype='float64' is no option of .* 'cayley'"),
        ("conv 8 in_channels=3", "in_channels=3 is no option of .* 'cayley'"),
        ("conv 8 stride=x", "in 'conv 8 stride=x', stride must be a positive int, got 'x'"),
        ("conv 8 groups=0", "in 'conv 8 groups=0', groups must be a positive int, got 0"),
        ("conv 8 dilation=true", "dilation must be a positive int, got True"),
        ("conv 8 g3", "groups must divide the channels 4 -> 8, got 3"),
        ("conv 8 k3 kernel_size=5", "kernel_size is given twice in 'conv 8 k3 kernel_size=5'"),
        ("conv 8 k3 k5", "kernel_size is given twice in 'conv 8 k3 k5'"),
        ("conv 8 bias=false bias=true", "bias is given twice in"),
        ("conv 8 3", r"is 'conv CHANNELS .*', got 'conv 8 3'; name=value"),
        ("conv 8 position=4", "position=4 is no option of .* 'cayley'"),
        ("conv 8 shift position=true", "position must be a positive int"),
        ("maxmin k3 k3", "is 'maxmin', got 'maxmin k3 k3'"),
        ("conv 8 shift position=4", "position=4 must be the side of the image, which has 8 x 8 pixels here"),
        ("conv 8 bias=", "is 'conv CHANNELS .*', got 'conv 8 bias='"),
        ("conv 8 a=b=c", "is 'conv CHANNELS .*', got 'conv 8 a=b=c'"),
        ("conv 8 padding_mode=reflect", "padding_mode must be .* got 'reflect'"),
        ("lprelu slope=x", "'lprelu slope=x', .* slope of 'lprelu' must be a number, got 'x'"),
        ("centre bias=3", "bias of 'centre' must be true or false, got 3"),
        ("maxmin dim=1", "dim=1 is no option of 'maxmin'; those that it takes are none"),
        ("centre eps=1", "eps=1 is no option of 'centre'; those that it takes are momentum, bias"),
        ("lprelu 0.5", r"is 'lprelu \[slope=NUMBER\]', got 'lprelu 0.5'"),
        ("pool 2 g2", "is 'pool SIDE', got 'pool 2 g2'"),
        ("conv 63", "'conv 63', .* an even number of channels or features, since MaxMin pairs them, got 63"),
    ],
)
def test_refusals(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build([line, "flatten", "head"], in_channels=4, image_size=8)
    assert "width" not in str(error.value), "nobody gave one"


def test_options_of_methods_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that takes any options gets them, and its TypeError is one of the line."""
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))

    def make(i: int, o: int, k: int, **options: Any) -> nn.Conv2d:
        return nn.Conv2d(i, o, k, padding="same", stride=options.pop("stride", 1), **options)

    register_method("any", conv=make, linear="cayley")
    model = build(["conv 8 bias=false", "flatten", "head"], "any", image_size=4)
    assert model[0].bias is None
    with pytest.raises(ValueError, match=r"make cannot be made with colour='red': .*colour"):
        build(["conv 8 colour=red", "flatten", "head"], "any", image_size=4)


# Words


def test_the_words_of_pools_and_shapes() -> None:
    words = ["conv 16", "l2pool 2", "upsample 2", "layercentre", "adaptivepool 2", "l2pool", "flatten", "head"]
    model = build(words, image_size=(8, 16)).eval()
    kinds = [L2Pool2d, InvertibleUpsample, LayerCentering, ScaledAdaptiveAvgPool2d, L2Pool2d]
    assert [type(layer) for layer in model[1:6]] == kinds
    assert [tuple(model[: k + 1](torch.rand(1, 3, 8, 16)).shape[1:]) for k in range(7)] == [
        (16, 8, 16), (16, 4, 8), (4, 8, 16), (4, 8, 16), (4, 2, 2), (4, 1, 1), (4,),
    ]  # fmt: skip
    assert lipschitz_bound(model, (3, 8, 16)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "divisor"),
    [
        (["downsample 2", "conv 16 s2", "flatten", "head"], 4),
        (["conv 16 stride=2", "l2pool 2", "flatten", "head"], 4),
        (["downsample 2", "upsample 2", "downsample 2", "flatten", "head"], 2),
        (["upsample 2", "pool 4", "flatten", "head"], 2),
        (["conv 16 s2", "adaptivepool 3", "pool 3", "flatten", "head"], 6),
        (["l2pool", "flatten", "head"], 1),
        (["conv 16 s2", {"residual": ["downsample 2", "upsample 2"]}, "flatten", "head"], 4),
    ],
)
def test_what_divides_the_sides(words: list[Any], divisor: int) -> None:
    assert divisor_of(words) == divisor
    build(words, in_channels=16, image_size=divisor)
    if divisor > 1:
        with pytest.raises(ValueError, match="cannot follow"):
            build(words, in_channels=16, image_size=divisor + 1)


# Residuals

RESIDUAL: list[Any] = ["conv 8 k3", "maxmin", {"residual": ["conv 8 k3", "maxmin", "conv 8 k3"]}, "flatten", "head"]


def test_a_residual_is_a_convex_one() -> None:
    model = build(RESIDUAL, image_size=4).double().eval()
    block = model[2]
    assert isinstance(block, ConvexResidual)
    assert isinstance(block.f[1], MaxMin)
    with torch.no_grad():
        block.alpha.fill_(0.3)
    x, s = torch.randn(2, 8, 4, 4, dtype=torch.float64), torch.sigmoid(torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(block(x), s * block.f(x) + (1 - s) * x)
    assert lipschitz_bound(model, (3, 4, 4)) < 1 + 1e-9


def test_a_residual_shares_the_bound() -> None:
    """Both ways through it have the factor of the layers in the branch."""
    model = build(RESIDUAL, image_size=4, lipschitz=16).double()
    assert count_layers(RESIDUAL) == 4
    assert [m.factor for m in model.modules() if isinstance(m, Scale)] == [2, 2, 2, 4, 2]
    assert lipschitz_bound(model.eval(), (3, 4, 4)) == pytest.approx(16, rel=1e-9)


def test_residuals_inside_each_other_and_of_vectors() -> None:
    inner = {"residual": ["linear 8", "maxmin"]}
    model = build(["flatten", "linear 8", {"residual": ["linear 8", inner]}, "head"], image_size=4)
    assert isinstance(model[2].f[1], ConvexResidual)
    assert model(torch.rand(2, 3, 4, 4)).shape == (2, 10)


def nested(depth: int) -> Any:
    return {"residual": [nested(depth - 1)]} if depth else "maxmin"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"residual": ["conv 6"]}, r"must keep that shape, and makes \(6, 4, 4\) of it"),
        ({"residual": ["conv 8 s2"]}, r"must keep that shape, and makes \(8, 2, 2\) of it"),
        ({"residual": ["conv 8", "mixmax"]}, "a layer is one of .* got 'mixmax'"),
        ({"residual": ["conv 8", "conv 8 g3"]}, r"layer 1, \{'residual'.* layer 1, 'conv 8 g3', .* groups must divide"),
        ({"residual": ["head"]}, "one head, which comes last and in no residual"),
        ({"residual": "conv 8"}, r"is 'residual: \[LAYER, ...\]', got \{'residual': 'conv 8'\}"),
        ({"residual": []}, r"is 'residual: \[LAYER, ...\]'"),
        ({"residual": None}, r"is 'residual: \[LAYER, ...\]'"),
        ({"skip": ["conv 8"]}, r"is 'residual: \[LAYER, ...\]', got \{'skip'"),
        ({"residual": ["conv 8"], "k": 3}, r"is 'residual: \[LAYER, ...\]'"),
        ("residual", "a layer is one of .* got 'residual'"),
        (nested(11), "10 deep, and no deeper"),
        (nested(400), "10 deep, and no deeper"),
    ],
)
def test_refused_residuals(line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(["conv 8", line, "flatten", "head"], image_size=4)


# Configurations


def test_a_run_with_options_and_a_residual(tmp_path) -> None:
    run = tmp_path / "run"
    words = (
        "[conv 8 k3 s2 bias=false, maxmin, residual: [conv 8 k3 g2, maxmin, conv 8 bro rank=2], flatten, "
        "head normalized]"
    )
    main(["train", "--out", str(run), "--model.layers", words, "--recipe.epochs", "1", "--recipe.augment", "false"])
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["layers"][2] == {"residual": ["conv 8 k3 g2", "maxmin", "conv 8 bro rank=2"]}
    spec = ModelSpec(layers=config["model"]["layers"])
    assert Training.of({"data": "digits", "model": config["model"]}).hash == Training("digits", spec).hash
    model = models.load(run)
    assert model[1].bias is None
    residual = model[3]
    assert isinstance(residual, ConvexResidual)
    assert (residual.f[0].groups, residual.f[2].rank) == (2, 2)


# Documentation

PAGE = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_page_names_every_word() -> None:
    table = PAGE.partition("| word | layer |")[2].partition("\n\n")[0]
    named = {text.split()[0] for text in re.findall(r"`([^`]+)`", table)}
    assert named >= {*LAYERS, "conv", "linear", "head", "residual:"}
    assert set(re.findall(r"`(\w+ \[?[A-Z]+[^`]*)`", table)) >= {
        " ".join((name, *kind.numbers)) for name, kind in LAYERS.items() if kind.numbers
    }


def test_the_examples_of_the_page_are_networks() -> None:
    examples = [yaml.safe_load(text)["model"]["layers"] for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S)]
    assert len(examples) == 2
    assert any(isinstance(line, dict) for line in examples[1])
    for words in examples:
        build(words, image_size=8)


def test_the_options_of_the_page_are_those_of_layers() -> None:
    table = PAGE.partition("| for example | gives the layer |")[2].partition("\n\n")[0]
    lines = re.findall(r"^\| `([^`]+)`", table, flags=re.M)
    assert len(lines) == 5
    for line in lines:
        before = ["flatten"] if line.startswith("linear") else []
        after = [] if before else ["flatten"]
        build([*before, line, *after, "head"], image_size=4)
