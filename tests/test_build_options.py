"""`build` with layers that start as the identity, with padding by zeros, and the depth of LiResNet."""

import math

import pytest
import torch

from orthoconv import lipschitz_bound, models
from orthoconv.lab.cli import main
from orthoconv.lab.configs import Training
from orthoconv.models import build
from orthoconv.nn import BaseConv2d, CayleyConv2d, LiResConv2d, conv_methods
from orthoconv.nn.image_layer import ImageLayer
from orthoconv.testing import dense_matrix

SQUARE = ["conv 8 k3", "conv 8 k3", "conv 32 k6 s2", "flatten", "linear 16", "linear 16", "head"]

# The identity


def test_square_layers_start_as_the_identity_and_others_as_usual() -> None:
    torch.manual_seed(0)
    usual = build(SQUARE, image_size=4).double()
    torch.manual_seed(0)
    model = build(SQUARE, image_size=4, identity=True).double()
    assert [getattr(layer, "identity", False) for layer in model] == [False, True, True, False, False, True, False]
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(model[1](x) - model[1].bias.view(-1, 1, 1), x)
    matrix = dense_matrix(model[2], (8, 4, 4))
    torch.testing.assert_close(matrix, matrix.round())
    torch.testing.assert_close(matrix.sum(0), torch.ones(128, dtype=torch.float64))  # pixels become channels, unmixed
    torch.testing.assert_close(dense_matrix(model[5], (16,)), torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(model[0].kernel, usual[0].kernel)


@pytest.mark.parametrize("conv", [name for name in conv_methods() if name != "lires"])
def test_every_method_with_the_option_gets_it(conv: str) -> None:
    words = ["conv 8 k1", "conv 8 k3", "flatten", "head"]
    first, second, *_ = build(words, conv, in_channels=4, image_size=4, identity=True)
    starts = [layer.identity or getattr(layer, "gate", None) is not None for layer in (first, second)]
    assert starts == [conv == "aol", True], "AOL starts so by itself"


def test_networks_by_name_start_as_the_identity() -> None:
    model = build("liresnet", "cayley", width=0.125, image_size=8, identity=True)
    convs = [m for m in model if isinstance(m, CayleyConv2d)]
    assert [m.identity for m in convs] == [False, True, True, True, True, False]
    model = build("resnet9", width=0.0625, image_size=16, identity=True)
    assert sum(m.identity for m in model.modules() if isinstance(m, CayleyConv2d)) == 4, "those of the residuals"
    for name, options, count in (("kwlarge", {}, 1), ("lipconvnet", {"depth": 10}, 4)):  # as docs/models.md says
        model = build(name, image_size=32, identity=True, **options)
        assert sum(getattr(m, "identity", False) for m in model) == count


def test_a_line_overrides_the_network() -> None:
    words = ["conv 4", "conv 4 identity=false padding_mode=circular", "conv 4", "flatten", "head"]
    model = build(words, image_size=4, identity=True, padding_mode="zeros")
    assert [m.identity for m in model[:3]] == [False, False, True]
    assert [m.padding_mode for m in model[:3]] == ["zeros", "circular", "zeros"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet9", {"conv": "eco"}, "conv must be one of"),
        (["flatten", "linear 8", "linear 8", "head"], {"linear": "plain"}, "identity=True .* linear layers of 'plain'"),
        ("critic", {}, "identity=True is for layers with as many outputs as inputs, and critic has none"),
        (["flatten", "head"], {}, "as many outputs as inputs, and custom has none"),
        ("kwlarge", {"identity": 1}, "identity must be True or False, got 1"),
    ],
)
def test_what_cannot_start_as_the_identity(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **{"width": 0.125 if isinstance(name, str) else 1, "identity": True, "image_size": 16, **options})


@pytest.mark.parametrize("conv", [conv for conv in conv_methods() if conv != "aol"])  # which always does
def test_square_convolutions_of_every_method_start_as_the_identity(conv: str) -> None:
    """Those of CPL and SLL have a gate, which starts almost closed."""
    model = build(["conv 4", "conv 4", "flatten", "head"], conv=conv, image_size=4, identity=True)
    assert [m.identity or getattr(m, "gate", None) is not None for m in model[:2]] == [False, True]


# Padding


@pytest.mark.parametrize("conv", conv_methods())
def test_every_convolution_is_padded_by_zeros(conv: str) -> None:
    model = build("kwlarge", conv, width=0.0625, image_size=4, padding_mode="zeros")
    assert [m.padding_mode for m in model.modules() if isinstance(m, ImageLayer)] == ["zeros"] * 4


def test_padding_by_zeros_loses_norm_at_the_border() -> None:
    model = build(["conv 8", "flatten", "head"], image_size=4, padding_mode="zeros").double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert (model[0](x) - model[0].bias.view(-1, 1, 1)).norm() < 0.99 * x.norm()
    assert lipschitz_bound(model, (3, 4, 4)) < 1 + 1e-9
    with pytest.raises(ValueError, match="padding_mode must be 'circular' or 'zeros', got 'reflect'"):
        build("kwlarge", padding_mode="reflect")


# Configurations


def test_old_configurations_keep_their_digests() -> None:
    plain = Training.of({"data": "digits"})
    assert plain.hash == "cfdd424a630e3ac8"
    assert plain.config["model"].keys().isdisjoint({"identity", "padding_mode"})
    assert Training.of({"data": "digits", "model": {"identity": False, "padding_mode": "circular"}}).hash == plain.hash
    others = [Training.of({"data": "digits", "model": m}).hash for m in ({"identity": True}, {"padding_mode": "zeros"})]
    assert len({plain.hash, *others}) == 3


def test_a_run_has_the_options(tmp_path) -> None:
    run, words = tmp_path / "run", "[conv 8 k3, maxmin, conv 8 k3, maxmin, flatten, head]"
    options = ["--model.identity", "true", "--model.padding_mode", "zeros", "--recipe.augment", "false"]
    main(["train", "--out", str(run), "--model.layers", words, *options, "--recipe.epochs", "1", "--examples", "64"])
    convs = [m for m in models.load(run) if isinstance(m, BaseConv2d)]
    assert [m.identity for m in convs] == [False, True]
    assert [m.padding_mode for m in convs] == ["zeros"] * 2


# LiResNet


@pytest.mark.parametrize("depth", [None, 1, 12])
def test_the_layers_of_liresnet_know_its_depth(depth: int | None) -> None:
    model = build("liresnet", width=0.125, image_size=8, depth=depth)
    layers = [m for m in model if isinstance(m, LiResConv2d)]
    count = 4 if depth is None else depth
    assert [m.depth for m in layers] == [1, *[count] * count, 1], "the stem and the neck are not of the body"


def test_the_depth_divides_what_a_layer_adds_to_the_identity() -> None:
    model = build("liresnet", width=0.125, image_size=8, depth=9).double()
    layer, x = model[2], torch.randn(2, 8, 4, 4, dtype=torch.float64)
    alone = LiResConv2d(8, 8, 3, dtype=torch.float64)
    alone.load_state_dict(layer.state_dict())
    b = layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(layer(x) - b - x, (alone(x) - b - x) / math.sqrt(9))


def test_other_methods_in_liresnet_have_no_depth() -> None:
    assert not any(hasattr(m, "depth") for m in build("liresnet", "cayley", width=0.125, image_size=8, depth=2))
