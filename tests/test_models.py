import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from orthoconv import certify, empirical_lipschitz, lipschitz_bound
from orthoconv.models import NETWORKS, build
from orthoconv.nn import BCOPConv2d, CayleyLinear, MaxMin, NormalizedLinear, Scale, conv_methods
from orthoconv.nn.reparametrized import Reparametrized

WIDTH = dict.fromkeys(NETWORKS, 0.125)

HEAVY = {"aoc", "bro", "cpl", "lires", "lot", "sll", "soc", "soc_taylor"}  # KWLarge stands for their other networks
every_network = pytest.mark.parametrize("name", NETWORKS)


def is_long(name: str, conv: str) -> bool:
    """Whether the slow suite has a pair: the quick one has every method in KWLarge, and one in every other network."""
    return name != "kwlarge" and conv != ("plain" if name == "wide_resnet10_10" else "cayley")


every_pair = pytest.mark.parametrize(
    ("name", "conv"),
    [
        pytest.param(name, conv, marks=[pytest.mark.slow] if is_long(name, conv) else [])
        for name in NETWORKS
        for conv in conv_methods()
        if name == "kwlarge" or conv not in HEAVY
    ],
)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, Reparametrized | nn.Linear)


@every_pair
def test_every_network_with_every_layer(name: str, conv: str) -> None:
    n = max(8, NETWORKS[name].divisor)
    model = build(name, conv, width=WIDTH[name], image_size=n)
    x, labels = torch.rand(8, 3, n, n), torch.arange(8)
    loss = F.cross_entropy(10 * model(x), labels)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    length = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.optim.SGD(model.parameters(), lr=0.01 / length.item()).step()
    assert F.cross_entropy(10 * model(x), labels) < loss

    bound = lipschitz_bound(model, (3, n, n))
    promises = {m.promise if isinstance(m, Reparametrized) else None for m in model.modules() if is_linear(m)}
    if None not in promises:
        assert bound < 1 + 2e-5
    if promises == {"orthogonal"}:
        assert bound > 1 - 2e-5
    assert (empirical_lipschitz(model, x[:2], 0.5, steps=3) <= bound * (1 + 1e-5)).all()

    other = build(name, conv, width=WIDTH[name], image_size=n).eval()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(other(x), model.eval()(x))


@every_pair
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (2, 16, 48)])
def test_image_sizes(name: str, conv: str, shape: tuple[int, int, int]) -> None:
    channels, *size = shape
    options = {"width": WIDTH[name], "in_channels": channels, "image_size": size, "classes": 7}
    divisor = NETWORKS[name].divisor
    if any(n % divisor for n in size):
        with pytest.raises(ValueError, match=rf"{name} takes images .* multiples of {divisor}, got image_size=\(.*\)"):
            build(name, conv, **options)
        return
    model = build(name, conv, **options).eval().requires_grad_(False)
    assert model(torch.rand(2, *shape)).shape == (2, 7)


@every_network
@pytest.mark.parametrize("bound", [0.85, pytest.param(3.0, marks=pytest.mark.slow)])
def test_lipschitz_argument(name: str, bound: float) -> None:
    conv = "cayley" if name == "liresnet" else None  # whose own convolutions are free
    n = max(8, NETWORKS[name].divisor)
    model = build(name, conv, width=WIDTH[name], lipschitz=bound, image_size=n)
    assert lipschitz_bound(model, (3, n, n)) == pytest.approx(bound, rel=2e-5)
    factors = {m.factor for m in model.modules() if isinstance(m, Scale)}
    assert min(factors, key=lambda f: abs(f - 1)) == pytest.approx(bound ** (1 / NETWORKS[name].depth))


@pytest.mark.parametrize("name", NETWORKS)
def test_depth_is_the_number_of_layers_in_a_row(name: str) -> None:
    """A gradient that counts: with every layer and skip scaled by c, the bound is c ** depth."""
    c = 1.01
    model = build(name, width=WIDTH[name], lipschitz=c ** NETWORKS[name].depth)
    scales = [m.factor for m in model.modules() if isinstance(m, Scale)]
    assert min(scales) == pytest.approx(c)


def test_normalisation_is_in_the_model_and_in_the_bound() -> None:
    mean, std = [0.5, 0.5, 0.5], [0.25, 0.5, 0.25]
    model = build("kwlarge", width=0.25, mean=mean, std=std)
    assert lipschitz_bound(model, (3, 32, 32)) == pytest.approx(4.0, rel=1e-4)
    centred = build("kwlarge", width=0.25, mean=mean)
    assert lipschitz_bound(centred, (3, 32, 32)) == pytest.approx(1.0, rel=1e-4)
    torch.testing.assert_close(centred[0](torch.full((1, 3, 4, 4), 0.5)), torch.zeros(1, 3, 4, 4))


def test_kwlarge_is_the_network_of_the_released_code() -> None:
    model = build("kwlarge")
    shapes = [tuple(m.weight.shape) for m in model if hasattr(m, "weight")]
    convs = [(32, 3, 3, 3), (32, 128, 1, 1), (64, 32, 3, 3), (64, 256, 1, 1)]
    assert shapes == [*convs, (512, 4096), (512, 512), (10, 512)]
    assert sum(p.numel() for p in model.parameters()) == 2_405_425
    paper = build("kwlarge", strided_kernel_size=4)
    assert paper[2].weight.shape == (32, 128, 2, 2)
    wide = build("kwlarge", width=2, kernel_size=5)
    assert wide[0].weight.shape == (64, 3, 5, 5)
    assert [tuple(m.weight.shape) for m in wide if isinstance(m, CayleyLinear)] == [
        (1024, 8192),
        (512, 1024),
        (10, 512),
    ]


def test_residual_networks_have_the_layers_of_the_released_code() -> None:
    def shapes(model: nn.Module) -> list[tuple[int, int]]:
        return sorted(m.weight.shape[:2] for m in model.modules() if hasattr(m, "weight"))

    convs = [(64, 3), (128, 64), *[(128, 128)] * 2, (256, 128), (512, 256), *[(512, 512)] * 2]
    assert shapes(build("resnet9")) == sorted([*convs, (512, 2048), (10, 512)])
    blocks = [(160, 16), (160, 160), (160, 16), (320, 160), (320, 320), (320, 160), (640, 320), (640, 640), (640, 320)]
    assert shapes(build("wide_resnet10_10")) == sorted([(16, 3), *blocks, (640, 2560), (10, 640)])


def test_linear_layers_go_with_the_convolutions() -> None:
    last = {conv: type(build("kwlarge", conv, width=0.25)[-1]).__name__ for conv in conv_methods()}
    bjorck = dict.fromkeys(("bcop", "rko", "ossn", "svcm"), "BjorckLinear")
    cayley = dict.fromkeys(("cayley", "cayley_bcop", "crko", "shift", "soc", "soc_taylor"), "CayleyLinear")
    own = {"plain": "Linear", "aol": "AOLLinear", "bro": "BROLinear", "lot": "PolarLinear", "aoc": "PolarLinear"}
    own |= {"cpl": "CPLLinear", "sll": "SLLLinear", "lires": "CholeskyLinear"}
    assert last == {**bjorck, **cayley, **own}
    assert isinstance(build("kwlarge", "plain", "cayley", width=0.25)[-1], CayleyLinear)
    layers = [m for m in build("kwlarge", "cayley_bcop", width=0.25) if isinstance(m, BCOPConv2d)]
    assert [m.orthogonalizer for m in layers] == ["cayley"] * 4
    assert not isinstance(build("kwlarge", width=0.25)[-1], MaxMin)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "vgg"}, "name must be one of 'kwlarge', .* got 'vgg'"),
        ({"conv": "eco"}, "conv must be one of .*'cayley', .* got 'eco'"),
        ({"linear": "lu"}, "linear must be one of .* got 'lu'"),
        ({"width": 0}, "width must make an even number of each 32 channels, got 0 x 32"),
        ({"width": 1 / 32}, "even number"),
        ({"kernel_size": 0}, "kernel_size must be a positive int, got 0"),
        ({"lipschitz": 0.0}, "lipschitz must be positive and finite, got 0.0"),
        ({"width": "2"}, "width must be a number, got '2'"),
        ({"lipschitz": "2"}, "lipschitz must be positive and finite, got '2'"),
        ({"mean": 0.5}, "mean needs one number"),
        ({"lipschitz": float("nan")}, "lipschitz must be positive and finite, got nan"),
        ({"image_size": 30}, r"multiples of 4, got image_size=\(30, 30\)"),
        ({"image_size": 0}, "image_size must be a positive int"),
        ({"classes": 0}, "classes must be a positive int, got 0"),
        ({"mean": [0.5]}, r"mean needs one number for each of 3 channels, got \[0.5\]"),
        ({"std": [0.5] * 3}, "needs a mean"),
        ({"name": "resnet9", "strided_kernel_size": 4}, "strided_kernel_size is for kwlarge, got 4 with resnet9"),
        ({"depth": 10}, "depth is for lipconvnet and liresnet, got 10 with kwlarge"),
        ({"name": "lipconvnet", "depth": 7}, "depth must be a multiple of 5 for lipconvnet, got 7"),
        ({"name": "lipconvnet", "depth": 0}, "depth must be a positive int, got 0"),
        ({"layers": ["head"]}, "layers are for the name 'custom', got 'kwlarge'"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(**{"name": "kwlarge", **arguments})


LIGHT = [
    (name, conv) for name in NETWORKS for conv in conv_methods() if name == "kwlarge" or conv in {"cayley", "plain"}
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "conv"), LIGHT)  # the others keep gigabytes: each step of their iterations
def test_at_full_width(name: str, conv: str) -> None:
    model = build(name, conv)
    loss = F.cross_entropy(10 * model(torch.rand(2, 3, 32, 32)), torch.arange(2))
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    if conv in {"aol", "bcop", "cayley", "cayley_bcop", "cpl", "crko", "rko", "sll"} and name != "wide_resnet10_10":
        assert lipschitz_bound(model, (3, 32, 32)) < 1 + 1e-4


@pytest.mark.parametrize("learned", [True, False])
def test_the_scale_is_learned_or_not(learned: bool) -> None:
    model = build("kwlarge", width=0.125, image_size=8, learned_scale=learned)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    moved = {k for k, p in model.named_parameters() if not torch.equal(p, before[k])}
    scales = {k for k in before if k.endswith(".g")}
    assert len(scales) == 7
    assert moved & scales == (scales if learned else set())
    assert moved >= {k for k in before if k.endswith(".weight")}


@every_network
def test_the_head_is_the_last_layer_alone(name: str) -> None:
    side = max(8, NETWORKS[name].divisor)
    options = {"image_size": side, "width": 0.125, "lipschitz": 2.0}
    torch.manual_seed(1)
    usual = build(name, **options)
    torch.manual_seed(1)
    model = build(name, head="normalized", **options)
    kinds = [[type(m).__name__ for m in network.modules()] for network in (usual, model)]
    assert [pair for pair in zip(*kinds, strict=True) if len(set(pair)) > 1] == [
        ("CholeskyLinear" if name == "liresnet" else "CayleyLinear", "NormalizedLinear")
    ]
    assert isinstance(model[-2], NormalizedLinear), "the last one, before its factor"
    x = torch.rand(4, 3, side, side)
    found = certify(model, [(x, torch.arange(4))])
    assert found.head == "pairwise"
    with pytest.raises(ValueError, match=r"head must be one of .*'normalized', 'plain'.*, got 'nothing'"):
        build(name, head="nothing")
