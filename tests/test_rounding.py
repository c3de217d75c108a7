"""What rounding does to certificates: the bound holds, the float64 twin is the exact function, radii allow for both."""

import copy
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from contract import CASES, LAYERS, Case
from oracles import conv_matrix, downsample_matrix
from torch import Tensor, fx, nn

from orthoconv import (
    certified_radius,
    certify,
    fourier,
    in_double,
    lipschitz_bound,
    models,
    register_rule,
    rounding_bound,
)
from orthoconv.certificates import growth, pairwise_radius
from orthoconv.certificates.heads import split_head
from orthoconv.data import load
from orthoconv.files import cache_dir
from orthoconv.nn import CayleyConv2d, CayleyLinear, ConvexResidual, MaxMin, Normalize, Scale, ScaledAvgPool2d
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.testing import dense_matrix


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


SOME = [CASES[k] for k in (1, 2, 6, 15, 20, 23)]


def exact_matrix(layer: BaseConv2d, case: Case, shape: tuple[int, ...]) -> Tensor:
    """The operator, entries of float32 included, as a dense matrix by the definition of a convolution."""
    size = layer.geometry.inner_size((shape[-2], shape[-1]))
    kernels = fourier.kernel_of(layer.spectrum((shape[-2], shape[-1]), double=True), size).chunk(layer.groups)
    whole = torch.block_diag(*(conv_matrix(kernel, size) for kernel in kernels))
    matrix = whole @ downsample_matrix(case.i, case.size, case.stride)
    return matrix.mT if layer.transposed else matrix


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case}", marks=[] if "Cayley" in name or k < 2 else [pytest.mark.slow])
        for name in LAYERS
        for k, case in enumerate(SOME)
    ],
)
def test_the_twin_in_double_is_the_operator_as_it_is(name: str, case: Case) -> None:
    layer, shape = LAYERS[name].layer(case, torch.float32).eval(), LAYERS[name].input_shape(case)
    assert isinstance(layer, BaseConv2d)
    twin = in_double(layer)
    exact = exact_matrix(layer, case, shape)
    assert torch.dist(dense_matrix(twin, shape, dtype=torch.float64), exact) < 1e-12
    x = torch.randn(3, *shape)
    error = (layer(x).double() - twin(x.double())).flatten(1).norm(dim=1).max()
    assert 0 < float(error) <= rounding_bound(layer, shape, float(x.flatten(1).norm(dim=1).max()))


def test_the_twin_does_not_make_its_operators_again() -> None:
    layer = CayleyConv2d(4, 4, 3).eval()
    again, twin = copy.deepcopy(layer).double(), in_double(layer)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    assert torch.dist(again(x), twin(x)) > 1e-9, "otherwise there is nothing to tell apart"
    norms = [(f(x) - f(0 * x)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1) - 1 for f in (again, twin)]
    assert norms[0].abs().max() < 1e-14
    assert norms[1].abs().max() > 1e-10, "the operator of float32 is orthogonal to its precision only"
    assert (norms[1] + 1).max() <= lipschitz_bound(layer, (4, 6, 6))


def network() -> nn.Sequential:
    """A network with a bit of everything."""
    branch = nn.Sequential(CayleyConv2d(8, 8, 3), MaxMin(), nn.BatchNorm2d(8))
    first = [Normalize([0.5], [0.25]), CayleyConv2d(1, 8, 3), MaxMin(), ConvexResidual(branch), nn.AvgPool2d(2)]
    middle = [nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), ScaledAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16)]
    return nn.Sequential(*first, *middle, nn.LeakyReLU(), CayleyLinear(16, 10), Scale(3.0)).eval()


def test_the_bound_holds_for_a_whole_network_and_its_gain_is_the_lipschitz_bound() -> None:
    model, x = network(), torch.rand(50, 1, 8, 8)
    nn.init.normal_(model[3].f[2].running_mean)
    nn.init.normal_(model[3].f[2].bias, std=3)
    grown = growth(model, (1, 8, 8))
    assert grown.lipschitz == pytest.approx(lipschitz_bound(model, (1, 8, 8)), rel=1e-12)
    error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
    bound = grown.error(x.flatten(1).norm(dim=1).double())
    assert (error <= bound).all()
    assert float(error.max()) > 1e-8
    double = rounding_bound(model, (1, 8, 8), 8.0, torch.float64)
    assert 0 < double < 1e-8
    assert double == pytest.approx(rounding_bound(model, (1, 8, 8), 8.0) * 2.0**-29, rel=1e-2)


def test_the_bound_of_double_holds_against_wider_numbers() -> None:
    """Linear layers in the 64-bit mantissa of long double, for sums that cancel."""
    model = nn.Sequential(CayleyLinear(300, 200), CayleyLinear(200, 10)).eval()
    nn.init.constant_(model[0].bias, 1e3)
    x = torch.rand(5, 300, dtype=torch.float64)
    y = x.numpy().astype(np.longdouble)
    for layer in model:
        Q, b = (t.detach().numpy().astype(np.longdouble) for t in (layer.cached_operator(), layer.bias))
        y = y @ Q.T + b
    error = np.linalg.norm((in_double(model)(x).numpy() - y).astype(np.float64), axis=1)
    assert 0 < error.max() <= rounding_bound(model, (300,), float(x.norm(dim=1).max()), torch.float64)


class TwoBranches(nn.Module):
    """Someone's network, with a sum and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.a(x))
        y = self.b(x) + x
        return self.head(torch.cat((x, y), 1).flatten(1))


def test_graphs_are_followed_too() -> None:
    model = fx.symbolic_trace(TwoBranches()).eval()
    x = torch.rand(20, 1, 6, 6)
    grown = growth(model, (1, 6, 6))
    assert grown.lipschitz == pytest.approx(lipschitz_bound(model, (1, 6, 6)), rel=1e-12)
    error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
    assert (error <= grown.error(x.flatten(1).norm(dim=1).double())).all()
    assert certify(model, [(x, model(x).argmax(1))]).slack is not None


def test_a_radius_is_less_by_the_slack() -> None:
    logits, labels = torch.tensor([[3.0, 1.0], [3.0, 1.0], [0.1, 0.0]]), torch.tensor([0, 0, 0])
    found = certified_radius(logits, labels, 2.0, torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(found, torch.tensor([math.sqrt(2) / 2, (math.sqrt(2) - 0.5) / 2, 0.0]))
    with pytest.raises(ValueError, match="slack must be at least 0"):
        certified_radius(logits, labels, slack=-1e-9)


def exact_radius(model: nn.Module, exact: Tensor, labels: Tensor, shape: Sequence[int]) -> Tensor:
    """The larger of the two radii, from exact logits."""
    head = split_head(model)
    assert head is not None
    pairwise = pairwise_radius(exact, labels, head.distances(), lipschitz_bound(head.body, shape))
    return pairwise.maximum(certified_radius(exact, labels, lipschitz_bound(model, shape)))


def test_rounding_that_would_certify_too_much_does_not() -> None:
    """Logits that large constants passed through: what float32 adds to margins, the slack takes away again."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), CayleyLinear(16, 16), CayleyLinear(16, 10)).eval()
    nn.init.constant_(model[1].bias, 3e4)
    nn.init.zeros_(model[2].bias)
    model[2].bias.sub_(model(torch.zeros(1, 1, 4, 4))[0])
    x = torch.rand(500, 1, 4, 4)
    labels = model(x).argmax(1)
    exact = exact_radius(model, in_double(model)(x.double()), labels, (1, 4, 4))
    naive, found = (certify(model, [(x, labels)], rounding=on) for on in (False, True))
    assert (naive.radius.double() > exact).float().mean() > 0.2, "otherwise this shows nothing"
    assert (found.radius.double() <= exact).all()
    assert found.slack is not None
    assert (found.radius.double() >= exact - 4 * found.slack).all(), "and no more than that is lost"
    assert naive.slack is None


class Negative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


def test_what_has_no_rule_is_named() -> None:
    register_rule(Negative, lipschitz=1.0)
    model, x = nn.Sequential(nn.Flatten(), Negative()), torch.rand(2, 1, 1, 3)
    with pytest.raises(TypeError, match=r"no rounding rule for Negative, at Sequential\.1;.*rounding=False\)"):
        certify(model, [(x, torch.tensor([0, 1]))])
    assert certify(model, [(x, torch.tensor([0, 1]))], rounding=False).lipschitz == 1
    register_rule(Negative, lipschitz=1.0, rounding=0.0)
    found = certify(model, [(x, torch.tensor([0, 1]))])
    assert found.slack is not None
    assert (found.slack == 0).all(), "a change of sign rounds nothing"
    with pytest.raises(ValueError, match=r"norm must be at least 0 and finite, got -1"):
        rounding_bound(model, (3,), -1)
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32 or torch\.float64, got torch\.float16"):
        rounding_bound(nn.Flatten(), (3,), 1.0, torch.float16)


def certified_beyond_exact(model: nn.Sequential, images: Tensor, labels: Tensor) -> tuple[int, int, float]:
    """Images whose radius exceeds the exact one with and without allowing for rounding, and the largest slack.

    The exact logits are those of float64, which for the first images are found by other means, too: each convolution
    by its kernel as large as the image.
    """
    plain = copy.deepcopy(model)
    for k, layer in enumerate(model):
        if isinstance(layer, BaseConv2d):
            plain[k] = _InSpace(layer)
        elif isinstance(layer, CayleyLinear):
            plain[k] = nn.Linear(layer.in_features, layer.out_features).double()
            plain[k].load_state_dict({"weight": layer.cached_operator().double(), "bias": layer.bias.detach().double()})
    twin, some = in_double(model), images[:100].double()
    exact = torch.cat([twin(x.double()) for x in images.split(250)])
    bound = rounding_bound(model, images.shape[1:], float(some.flatten(1).norm(dim=1).max()), torch.float64)
    assert (plain.double()(some) - exact[:100]).norm(dim=1).max() <= 10 * bound < 1e-6, "sums of more terms"
    test = list(zip(images.split(250), labels.split(250), strict=True))
    radius = exact_radius(model, exact, labels, images.shape[1:])
    found, naive = certify(model, test), certify(model, test, rounding=False)
    assert found.slack is not None
    beyond = [int((f.radius.double() > radius).sum()) for f in (found, naive)]
    return beyond[0], beyond[1], float(found.slack.max())


class _InSpace(nn.Module):
    """A convolution by one matrix product with patches of the whole image: no Fourier transform of the input."""

    def __init__(self, layer: BaseConv2d) -> None:
        super().__init__()
        self.layer = (layer,)

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.layer
        size = (x.shape[-2], x.shape[-1])
        kernel = fourier.kernel_of(layer.spectrum(size, double=True), layer.geometry.inner_size(size))
        blocks = nn.functional.pixel_unshuffle(x, layer.stride[0])
        h, w = blocks.shape[-2:]
        padded = nn.functional.pad(blocks, ((w - 1) // 2, w // 2, (h - 1) // 2, h // 2), mode="circular")
        return nn.functional.conv2d(padded, kernel) + layer.bias.detach().double()[:, None, None]


def test_nothing_is_certified_on_digits_that_exact_arithmetic_would_not() -> None:
    _, test = load("digits")
    model = models.build("kwlarge", width=0.25, in_channels=1, image_size=8).eval()
    images = test.images[:300]
    beyond, naive, slack = certified_beyond_exact(model, images, model(images).argmax(1))
    assert beyond == 0
    assert naive > 0, "otherwise this shows nothing"
    assert 0 < slack < 1e-4


@pytest.mark.long
@pytest.mark.skipif(not (cache_dir() / "cifar10.bin").exists(), reason="needs CIFAR-10 in the cache")
def test_nothing_is_certified_on_cifar10_that_exact_arithmetic_would_not() -> None:
    _, test = load("cifar10")
    model = models.pretrained("kwlarge_cayley_cifar10")
    beyond, naive, slack = certified_beyond_exact(model, test.images, test.labels)
    print(f"{len(test.labels)} images: {beyond} radii beyond the exact one, {naive} without slack; slack {slack:.2g}")
    assert beyond == 0
    assert naive > 0


# What a review found


def test_inputs_of_two_shapes_are_refused() -> None:
    """The norm of a circular convolution depends on the image: a bound for one size is none for another."""
    model = nn.Sequential(CayleyConv2d(1, 1, 3), nn.Flatten(), nn.Linear(16, 3)).eval()
    data = [(torch.rand(2, 1, *size), torch.tensor([0, 1])) for size in ((16, 1), (4, 4))]
    for some in (data[:1], data[1:]):
        assert len(certify(model, some).radius) == 2
    with pytest.raises(ValueError, match=r"inputs of one shape, got \(1, 4, 4\) after \(1, 16, 1\)"):
        certify(model, data)


@pytest.mark.filterwarnings("ignore:This overload of add is deprecated")
def test_sums_in_graphs() -> None:
    class Sum(nn.Module):
        def __init__(self, add) -> None:
            super().__init__()
            self.add = add

        def forward(self, x: Tensor) -> Tensor:
            return self.add(x)

    twice = fx.symbolic_trace(Sum(lambda x: torch.add(x, x)))
    assert lipschitz_bound(twice, (2,)) == growth(twice, (2,)).lipschitz == 2
    with pytest.raises(TypeError, match="no rule for call_method add"):  # 6 x
        lipschitz_bound(fx.symbolic_trace(Sum(lambda x: x.add(5, x))), (2,))
    shifted = fx.symbolic_trace(Sum(lambda x: x + 1e9))
    assert lipschitz_bound(shifted, (2,)) == 1
    x = torch.tensor([0.6, 0.8])  # of which float32 keeps nothing beside 1e9
    assert (shifted(x).double() - (x.double() + 1e9)).norm() <= growth(shifted, (2,)).error(1.0) < 1e3
    beside = growth(fx.symbolic_trace(Sum(lambda x: torch.cat((x, x), 1))), (2,))
    assert beside.lipschitz == pytest.approx(math.sqrt(2))
    assert beside.relative == 0


class Wrap(nn.Module):
    """Someone's module around another, whose own arithmetic nobody knows."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x + 1e8 - 1e8)


def test_modules_around_others_have_no_rule_by_themselves() -> None:
    register_rule(Wrap, lipschitz=lambda module, shape: lipschitz_bound(module.f, shape))
    assert lipschitz_bound(Wrap(nn.Identity()), (2,)) == 1
    with pytest.raises(TypeError, match=r"no rounding rule for Wrap"):
        rounding_bound(nn.Sequential(nn.Linear(2, 2), Wrap(nn.Identity())), (2,), 1.0)


@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm", "orthogonal"])
def test_the_twin_keeps_what_parametrizations_computed(name: str) -> None:
    model = nn.Sequential(getattr(nn.utils.parametrizations, name)(nn.Linear(64, 3))).eval()
    x = torch.rand(50, 64, dtype=torch.float64)
    exact = x @ model[0].weight.double().mT + model[0].bias.double()
    assert torch.dist(in_double(model)(x), exact) < 1e-12
    assert torch.dist(model(x.float()), exact) < 1e-4, "the model itself is as it was"


@pytest.mark.parametrize("alpha", [-30.0, 0.0, 10.0, 30.0])
def test_convex_weights_keep_their_digits(alpha: float) -> None:
    model = ConvexResidual(Scale(0.0)).eval()
    nn.init.constant_(model.alpha, alpha)
    skip = 1 / (1 + math.exp(alpha))
    assert lipschitz_bound(model, (3,)) == pytest.approx(skip, rel=1e-14)
    x = torch.rand(20, 3, dtype=torch.float64)
    error = (model.double()(x) - skip * x).norm(dim=1)
    assert (error <= growth(model, (3,), torch.float64).error(x.norm(dim=1))).all()


@pytest.mark.parametrize("size", [(31, 29), (61, 1)])
def test_the_bound_of_double_holds_for_kernels_by_fft(size: tuple[int, int]) -> None:
    """Few taps in space, and transforms of prime length."""
    layer = LAYERS["RKOConv2d"].build(1, 1, (2, 1), bias=False).eval()
    x = torch.randn(1, 1, *size, dtype=torch.float64)
    kernel = layer.cached_operator((1, 1))[0, 0, :, 0].double().numpy().astype(np.longdouble)
    wide = x[0, 0].numpy().astype(np.longdouble)
    exact = kernel[0] * wide + kernel[1] * np.roll(wide, -1, axis=0)
    error = float(np.linalg.norm((in_double(layer)(x)[0, 0].numpy() - exact).astype(np.float64)))
    assert 0 < error <= rounding_bound(layer, (1, *size), float(x.norm()), torch.float64)


def test_what_works_in_place_is_given_a_copy() -> None:
    model = nn.Sequential(nn.LeakyReLU(0.5, inplace=True), nn.Flatten(), CayleyLinear(9, 3)).eval()
    x = torch.randn(20, 1, 3, 3)
    kept = x.clone()
    found = certify(model, [(x, torch.zeros(20, dtype=torch.long))])
    assert torch.equal(x, kept)
    assert found.slack is not None
    assert found.slack.max() < 1e-5


def test_every_module_keeps_its_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 3)).train()
    model[1].eval()
    certify(model, [(torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.long))])
    assert [m.training for m in model.modules()] == [True, True, False, True]
    with pytest.raises(ValueError, match="at least one batch"):
        certify(model, [], lipschitz=1.0)
