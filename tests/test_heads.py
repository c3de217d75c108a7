"""Pairwise certificates: models that end in a linear layer, orthogonal or not."""

import math

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certified_radius, certify, in_double, lipschitz_bound
from orthoconv.attacks import L2Ball, cross_examine, pgd
from orthoconv.certificates import pairwise_radius
from orthoconv.certificates.heads import split_head
from orthoconv.data import load
from orthoconv.nn import (
    BjorckLinear,
    CayleyConv2d,
    CayleyLinear,
    ConvexResidual,
    Ensemble,
    IsometryAverage,
    MaxMin,
    Mirror,
    Move,
    Normalize,
    NormalizedLinear,
    Scale,
    Shift,
)
from orthoconv.onnx_files import certificate_metadata
from orthoconv.train import Recipe, fit


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


def linear(W: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(W.shape[1], W.shape[0], bias is not None, dtype=W.dtype)
    with torch.no_grad():
        layer.weight.copy_(W)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def distance_to_boundary(W: Tensor, b: Tensor, x: Tensor, t: int) -> float:
    """Distance of x to the nearest hyperplane on which another class draws level with t."""
    others = [j for j in range(len(W)) if j != t]
    return min(float(((W[t] - W[j]) @ x + b[t] - b[j]) / (W[t] - W[j]).norm()) for j in others)


# The formula


def test_the_radius_of_a_linear_model_is_the_distance_to_the_boundary() -> None:
    """Neither more nor, but for rounding, less; the sqrt(2) L of the paper is less."""
    W, b, Q = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, dtype=torch.float64), orthogonal(8)
    model = nn.Sequential(nn.Sequential(linear(3 * Q)), nn.Sequential(nn.Identity(), linear(W, b), Scale(-0.5)))
    x = torch.randn(40, 8, dtype=torch.float64)
    with torch.no_grad():
        labels = model(x).argmax(1)
    found = certify(model, [(x[:25], labels[:25]), (x[25:], labels[25:])])
    assert found.head == "pairwise"
    effective, constant = -1.5 * W @ Q, -0.5 * b
    points = zip(x, labels, strict=True)
    exact = torch.tensor([distance_to_boundary(effective, constant, *e) for e in points], dtype=torch.float64)
    assert (found.radius <= exact).all()
    torch.testing.assert_close(found.radius, exact, rtol=1e-10, atol=1e-10)
    old = certified_radius(found.logits, labels, found.lipschitz)
    assert (found.radius > 1.05 * old).all(), "otherwise there is nothing to tell apart"


def test_float32_radii_stay_below_the_exact_ones() -> None:
    model = nn.Sequential(nn.Flatten(), CayleyLinear(16, 16), NormalizedLinear(16, 10)).eval()
    nn.init.normal_(model[2].weight)
    nn.init.constant_(model[1].bias, 100.0)  # for much rounding
    x = torch.rand(300, 1, 4, 4)
    with torch.no_grad():
        labels = model(x).argmax(1)
        twin = in_double(model)
    W, b = twin[2].weight @ twin[1].weight, twin[2].weight @ twin[1].bias + twin[2].bias
    points = zip(x.flatten(1).double(), labels, strict=True)
    exact = torch.tensor([distance_to_boundary(W, b, *e) for e in points], dtype=torch.float64)
    found, naive = (certify(model, [(x, labels)], rounding=on) for on in (True, False))
    assert (found.radius.double() <= exact).all()
    assert (naive.radius.double() > exact).any(), "otherwise the rounding shows nothing"
    assert found.slack is not None
    assert (found.radius.double() >= exact * (1 - 1e-5) - 4 * found.slack).all()


def test_slack_of_a_pair_of_logits() -> None:
    """An error of norm eta moves the difference of two logits by sqrt(2) eta at the most, and can do so."""
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    logits, labels, eta = torch.tensor([[3.0, 1.0]], dtype=torch.float64), torch.tensor([0]), 0.25
    found = pairwise_radius(logits, labels, torch.cdist(rows, rows), 2.0, eta)
    torch.testing.assert_close(found.item(), (2 - math.sqrt(2) * eta) / (2 * math.sqrt(5)))
    worst = logits + eta / math.sqrt(2) * torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
    assert found <= pairwise_radius(worst, labels, torch.cdist(rows, rows), 2.0)
    each = pairwise_radius(logits.repeat(2, 1), labels.repeat(2), torch.cdist(rows, rows), 2.0, torch.tensor([0, eta]))
    assert each[1] == found < each[0]


def test_equal_rows_limit_nothing_or_everything() -> None:
    distances = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], [2.0, 2.0, 0.0]])
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 3.0, 1.0], [1.0, 0.0, 5.0]], requires_grad=True)
    radius = pairwise_radius(logits, torch.tensor([0, 0, 2]), distances)
    exact = torch.tensor([1.0, 0.0, 2.0])
    assert (radius <= exact).all(), "radii are rounded down"
    torch.testing.assert_close(radius.detach(), exact, rtol=1e-6, atol=0)
    radius.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    same = pairwise_radius(logits[:2], torch.tensor([0, 0]), torch.zeros(3, 3), slack=0.1)
    assert same.tolist() == [math.inf, 0.0]
    assert pairwise_radius(logits[:1], torch.tensor([0]), torch.zeros(3, 3), slack=1.0).tolist() == [0.0]
    model = nn.Sequential(nn.Flatten(), linear(torch.ones(3, 4), torch.tensor([1.0, 0.0, 0.0])))
    found = certify(model, [(torch.rand(2, 1, 2, 2), torch.tensor([0, 1]))])
    assert found.radius[0] > 1e30
    assert found.radius[1] == 0


def test_distances_are_upper_bounds_however_small() -> None:
    tiny = split_head(linear(torch.tensor([[0.0, 0.0], [3e-200, 4e-200]], dtype=torch.float64)))
    assert tiny is not None
    assert 5e-200 <= float(tiny.distances()[0, 1]) <= 6e-200
    W = torch.randn(7, 300)
    head = split_head(nn.Sequential(linear(W), Scale(-3.0)))
    assert head is not None
    exact = 3 * (W[:, None].double() - W.double()).norm(dim=2)
    assert (head.distances() >= exact).all()
    torch.testing.assert_close(head.distances(), exact, rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distances": torch.zeros(3, 2)}, r"distances must be at least 0, of shape \(2, 2\), got shape \(3, 2\)"),
        ({"distances": -torch.ones(2, 2)}, "and smallest -1"),
        ({"distances": torch.full((2, 2), math.nan)}, "and smallest nan"),
        ({"lipschitz": 0.0}, r"lipschitz must be positive and finite, got 0\.0"),
        ({"lipschitz": math.inf}, "lipschitz must be positive and finite, got inf"),
        ({"slack": -1.0}, r"slack must be at least 0, .*, got -1\.0"),
        ({"slack": math.nan}, "slack must be at least 0, .*, got nan"),
        ({"slack": torch.zeros(3)}, r"one number or one for each of \(1,\) examples, got tensor"),
        ({"slack": torch.zeros(1, 1)}, r"one number or one for each of \(1,\) examples, got tensor"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"logits \(b, classes\) and labels"),
    ],
)
def test_what_is_refused(arguments, message) -> None:
    usual = {"logits": torch.zeros(1, 2), "labels": torch.zeros(1, dtype=torch.long), "distances": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=message):
        pairwise_radius(**{**usual, **arguments})


# Which models end in a linear layer


class Shifted(nn.Linear):
    """Someone's layer, which is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


class Curved(BjorckLinear):
    """Someone's layer with a bound of its own, which is not linear either."""

    def lipschitz(self, shape=()) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


def test_what_counts_as_a_head() -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    for head in (nn.Linear(4, 3), CayleyLinear(4, 3), BjorckLinear(4, 3), NormalizedLinear(4, 3), parametrized):
        for tail in ([], [Scale(2.0)], [nn.Identity(), nn.Sequential(Scale(-2.0), nn.Sequential())]):
            model = nn.Sequential(nn.Flatten(), nn.Sequential(MaxMin(), head, *tail[:1]), *tail[1:]).eval()
            split, x = split_head(model), torch.randn(5, 4)
            assert split is not None
            assert [type(m).__name__ for m in split.body] == ["Flatten", "MaxMin"]
            torch.testing.assert_close(model(x), split.factor * (split.body(x) @ split.matrix.mT + head.bias))
    for last in (MaxMin(), nn.Flatten(), Shifted(4, 3), Curved(4, 3), ConvexResidual(nn.Linear(4, 4)), nn.Tanh()):
        assert split_head(nn.Sequential(nn.Linear(4, 4), last)) is None
    assert split_head(nn.Sequential()) is None
    assert split_head(Scale(1.0)) is None
    twice = nn.Linear(4, 4)
    split = split_head(nn.Sequential(twice, MaxMin(), twice))
    assert split is not None
    assert len(split.body) == 2
    assert split.body[0] is twice


class Own(nn.Module):
    """A model with a forward pass of its own; the rows of its head are close to each other."""

    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(CayleyConv2d(1, 4, 3), MaxMin(), nn.Flatten()), NormalizedLinear(64, 3)
        self.last = nn.Identity() if last is None else last
        with torch.no_grad():
            self.head.weight[:, :32] += 3

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.body(x)))

    def as_sequential(self) -> nn.Module:
        return nn.Sequential(self.body, self.head, self.last)


def around(f: nn.Module) -> dict[str, nn.Module]:
    """What a model may stand in without losing its head."""
    numbers = Shift((3,))
    with torch.no_grad():
        numbers.bias.copy_(torch.tensor([0.3, -0.2, 0.1]))
    return {
        "shift": nn.Sequential(Normalize([0.5], [1.0]), f, numbers, nn.Sequential(Scale(0.5))),
        "mirror": nn.Sequential(IsometryAverage(f), Scale(2.0)),
        "moves": IsometryAverage(nn.Sequential(f), [Mirror(), Move(1, 0)]),
        "ensemble": Ensemble([f, nn.Sequential(f, Scale(0.5))]),
        "mirrored ensemble": IsometryAverage(Ensemble([f])),
    }


@pytest.mark.parametrize("name", around(nn.Identity()))
def test_a_forward_of_its_own_keeps_its_head_inside_of_others(name: str) -> None:
    own, x = Own().eval(), torch.rand(6, 1, 4, 4)
    model, other = around(own)[name], around(own.as_sequential())[name]
    batch = [(x, model(x).argmax(1))]
    found, expected = certify(model, batch), certify(other, batch)
    assert found.head == expected.head == "pairwise"
    torch.testing.assert_close(found.radius, expected.radius, rtol=1e-5, atol=1e-7)
    by_norm = certified_radius(found.logits, found.labels, found.lipschitz)
    assert (found.radius > 1.5 * by_norm).all(), "the negative control: without the head, radii are shorter"
    rates = certificate_metadata(model, (1, 4, 4))["rates"]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(certificate_metadata(other, (1, 4, 4))["rates"]))
    model.register_forward_hook(lambda module, args, y: 100 * y)
    with pytest.raises(TypeError, match="hooks"):
        certify(model, batch)


def test_a_forward_that_ends_in_a_sequence_keeps_its_head() -> None:
    """As self.classifier of VGG and AlexNet."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = Own()
            self.features, self.classifier = own.body, nn.Sequential(CayleyLinear(64, 64), MaxMin(), own.head)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.features(x))

    model, x = Classifier().eval(), torch.rand(6, 1, 4, 4)
    batch = [(x, model(x).argmax(1))]
    found, expected = certify(model, batch), certify(nn.Sequential(model.features, model.classifier), batch)
    assert found.head == "pairwise"
    torch.testing.assert_close(found.radius, expected.radius, rtol=1e-5, atol=1e-7)
    model.classifier.register_forward_hook(lambda module, args, y: 100 * y)
    with pytest.raises(TypeError, match="hooks"):
        certify(model, batch)


def test_a_graph_that_ends_in_a_mean_of_heads() -> None:
    own = Own(Ensemble([nn.Tanh(), nn.Identity()])).eval()
    x = torch.rand(6, 1, 4, 4)
    assert certify(own, [(x, own(x).argmax(1))]).head == "lipschitz", "parts of a mean that are no heads"

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = IsometryAverage(Own().as_sequential())

        def forward(self, x: Tensor) -> Tensor:
            return self.f(2 * x)

    mean = Mean().eval()
    found = certify(mean, [(x, mean(x).argmax(1))])
    expected = certify(nn.Sequential(Scale(2.0), mean.f), [(x, mean(x).argmax(1))])
    assert found.head == "pairwise"
    torch.testing.assert_close(found.radius, expected.radius, rtol=1e-5, atol=1e-7)


def test_other_models_and_other_bounds_keep_the_rule_of_the_paper() -> None:
    x, labels = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 3])
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), MaxMin())
    found = certify(plain, [(x, labels)], rounding=False)
    assert found.head == "lipschitz"
    assert torch.equal(found.radius, certified_radius(found.logits, labels, found.lipschitz))
    given = certify(plain[:2], [(x, labels)], lipschitz=2.0, rounding=False)
    assert given.head == "lipschitz"
    assert torch.equal(given.radius, certified_radius(given.logits, labels, 2.0))
    hooked = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4)))
    hooked[1].register_forward_hook(lambda module, args, y: 100 * y)
    with pytest.raises(TypeError, match="forward hooks"):
        certify(hooked, [(x, labels)])


@pytest.mark.parametrize("head", [nn.Linear, CayleyLinear, BjorckLinear, NormalizedLinear])
@pytest.mark.parametrize("classes", [2, 6, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rounding", [True, False])
def test_no_radius_is_smaller_than_before(head, classes: int, rounding: bool) -> None:
    model = nn.Sequential(nn.Flatten(), CayleyLinear(9, 8), MaxMin(), head(8, classes), Scale(0.7)).eval()
    x = torch.rand(50, 1, 3, 3)
    labels = model(x).argmax(1).detach()
    labels[:10] = 0  # some of them wrong
    new = certify(model, [(x, labels)], rounding=rounding)
    old = certify(model, [(x, labels)], lipschitz=lipschitz_bound(model, (1, 3, 3)), rounding=rounding)
    assert (new.radius >= old.radius).all()
    assert (new.radius > 0).any()
    assert (new.head, old.head) == ("pairwise", "lipschitz")


# Attacks


def test_the_formula_of_public_code_is_broken_by_an_attack_and_ours_is_not() -> None:
    """Rows of norm 1 that are opposite to each other: margin / sqrt(2) promises 1.41 times the distance."""
    model = nn.Sequential(nn.Flatten(), CayleyLinear(4, 4, bias=False), NormalizedLinear(4, 3)).eval()
    Q = model[1].cached_operator().detach()
    with torch.no_grad():
        rows = torch.tensor([[5.0, 0, 0, 0], [-0.1, 0, 0, 0], [0, 1.0, 1.0, 0]])
        model[2].weight.copy_(rows @ Q.mT)  # the logits are then those of x itself
        model[2].bias.copy_(torch.tensor([-0.5, 0.5, -5.0]))
    model.requires_grad_(False)
    x = torch.full((8, 1, 2, 2), 0.5)
    x[:, 0, 0, 0] += torch.linspace(0.05, 0.3, 8)
    labels = torch.zeros(8, dtype=torch.long)
    found = certify(model, [(x, labels)])
    wrong = certified_radius(found.logits, labels, lipschitz=1.0)  # the bound of the layers before the last
    assert found.lipschitz == pytest.approx(math.sqrt(2), rel=1e-5)
    torch.testing.assert_close(found.radius, torch.linspace(0.05, 0.3, 8), rtol=1e-4, atol=0)

    def survive(radius: Tensor) -> Tensor:
        return model(pgd(model, x, labels, L2Ball(0.999 * radius), iterations=30)).argmax(1) == labels

    assert survive(found.radius).all()
    assert not survive(wrong).any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_nothing_is_broken_on_digits(tmp_path) -> None:
    pytest.importorskip("pyautoattack")
    training, test = load("digits")
    model = nn.Sequential(
        CayleyConv2d(1, 8, 3), MaxMin(), CayleyConv2d(8, 16, 2, stride=2), MaxMin(),
        nn.Flatten(), CayleyLinear(256, 64), MaxMin(), NormalizedLinear(64, 10),
    )  # fmt: skip
    recipe = Recipe(epochs=4, batch_size=64, loss="cross_entropy", augment=False)
    assert len(list(fit(model, training, recipe, tmp_path / "checkpoint"))) == 4
    model.eval().requires_grad_(False)
    x, labels = test.images[:200], test.labels[:200]
    found = certify(model, [(x, labels)])
    old = certified_radius(found.logits, labels, found.lipschitz)
    assert found.clean_accuracy > 0.85
    assert found.radius.mean() > 1.1 * old.mean(), "the head is not orthogonal, and pairwise radii are larger"
    assert not cross_examine(model, x, labels, found.radius, iterations=15, restarts=1).any()
    assert cross_examine(model, x, labels, 3 * found.radius, iterations=15, restarts=1).float().mean() > 0.5


@pytest.mark.parametrize(("a", "b"), [(1e-162, 1e-162), (1e-162, 7e-162), (-1e-200, 1e-200)])
def test_factors_whose_product_underflows_certify_too_little_not_too_much(a: float, b: float) -> None:
    """Two large layers make up for two small factors. The other class wins at the distance 0.25 sqrt(2)."""

    def times(s: float) -> nn.Linear:
        layer = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        layer.weight.data = s * torch.eye(2, dtype=torch.float64)
        return layer

    model = nn.Sequential(times(1e70), times(1e70), times(1.0), Scale(a), Scale(b))
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    label = torch.tensor([0 if a > 0 else 1])
    assert certify(model, [(x, label)]).radius.item() <= 0.25 * 2**0.5


def test_a_finite_radius_stays_finite_in_half_precision() -> None:
    plane = nn.Linear(2, 2, bias=False).half()
    plane.weight.data = torch.eye(2, dtype=torch.float16)
    x = torch.tensor([[6e4, -6e4]], dtype=torch.float16)
    found = certify(nn.Sequential(plane, Scale(1e-4)), [(x, torch.tensor([0]))])
    assert found.radius.item() <= 6e4 * 2**0.5
