import math

import pytest
import torch
from torch import nn

from orthoconv import certified_radius, certify, lipschitz_bound, verify
from orthoconv.attacks import L2Ball, apgd, pgd
from orthoconv.certificates import bounds
from orthoconv.nn import CayleyLinear, MaxMin, NormalizedLinear, Scale


def test_radius_is_the_margin_over_sqrt_two() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0], [1.0, 5.0, 0.0], [1.0, 1.0, 1.0]])
    labels = torch.tensor([0, 1, 0, 2])
    expected = torch.tensor([2 / math.sqrt(2), 0.0, 0.0, 0.0])  # right, tied, wrong, tied
    torch.testing.assert_close(certified_radius(logits, labels), expected)
    torch.testing.assert_close(certified_radius(logits, labels, lipschitz=4.0), expected / 4)


def test_radius_is_sharp_for_a_linear_classifier() -> None:
    """With W = I the decision boundary between two classes lies exactly at the radius."""
    x = torch.tensor([[2.0, 0.5]], dtype=torch.float64)
    radius = certified_radius(x, torch.tensor([0]))
    step = torch.tensor([[-1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
    assert (x + (radius - 1e-9) * step).argmax() == 0
    assert (x + (radius + 1e-9) * step).argmax() == 1


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_bounds_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="lipschitz must be positive and finite"):
        certified_radius(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), bad)


def model_and_data() -> tuple[nn.Sequential, list[tuple[torch.Tensor, torch.Tensor]]]:
    model = nn.Sequential(nn.Flatten(), CayleyLinear(12, 5), Scale(2.0))
    images = torch.rand(30, 3, 2, 2)
    labels = model(images).argmax(1).detach()
    labels[:5] = (labels[:5] + 1) % 5
    return model, [(images[:20], labels[:20]), (images[20:], labels[20:])]


def test_certify_uses_the_bound_of_the_model() -> None:
    model, data = model_and_data()
    found = certify(model, data, [0.01, 0.1])
    assert found.lipschitz == pytest.approx(2.0, rel=1e-5)
    assert found.lipschitz == lipschitz_bound(model, (3, 2, 2))
    assert found.clean_accuracy == pytest.approx(25 / 30)
    assert (found.radius[:5] == 0).all()
    torch.testing.assert_close(found.radius, certified_radius(found.logits, found.labels, found.lipschitz))
    assert found.certified_accuracy[0.01] >= found.certified_accuracy[0.1]
    assert certify(model, data, [0.01], lipschitz=1e9).certified_accuracy[0.01] == 0
    assert certify(model, data, 0.1).certified_accuracy == {0.1: found.certified_accuracy[0.1]}
    assert model.training


def test_certify_refuses_bad_input() -> None:
    model, data = model_and_data()
    with pytest.raises(ValueError, match=r"eps must be at least 0, got -0\.1"):
        certify(model, data, [-0.1])
    with pytest.raises(ValueError, match="at least one batch"):
        certify(model, [])
    with pytest.raises(ValueError, match=r"logits \(b, classes\) and labels"):
        certified_radius(torch.zeros(3, 4), torch.zeros(2, dtype=torch.long))


ATTACKS = {
    "pgd": lambda *args: pgd(*args, iterations=20, generator=torch.Generator().manual_seed(0)),
    "apgd ce": lambda *args: apgd(*args, loss="ce", iterations=20),
    "apgd dlr": lambda *args: apgd(*args, loss="dlr", iterations=20),
}


@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_stay_in_the_ball_and_spare_what_is_certified(name: str) -> None:
    if name != "pgd":
        pytest.importorskip("pyautoattack")
    model, data = model_and_data()
    model.eval()
    x, labels = data[0]
    found = certify(model, data[:1])
    eps = float(found.radius.median())
    adversarial = ATTACKS[name](model, x, labels, L2Ball(eps))
    assert (adversarial - x).flatten(1).norm(dim=1).max() <= eps * (1 + 1e-5)
    assert adversarial.min() >= 0
    assert adversarial.max() <= 1
    alive = model(adversarial).argmax(1) == labels
    assert alive[found.radius > eps].all()
    strong = ATTACKS[name](model, x, labels, L2Ball(20 * eps))
    assert (model(strong).argmax(1) == labels).float().mean() < 0.5, "a large ball breaks most of them"


def test_pgd_finds_the_boundary_of_a_linear_classifier() -> None:
    x = torch.full((1, 2), 0.5)
    x[0, 0] += 0.2
    model, labels = nn.Identity(), torch.tensor([0])
    radius = 0.2 / math.sqrt(2)
    assert model(pgd(model, x, labels, L2Ball(1.05 * radius))).argmax() == 1
    assert model(pgd(model, x, labels, L2Ball(0.95 * radius))).argmax() == 0


def test_pgd_is_not_blinded_by_large_logits() -> None:
    """Cross-entropy has no gradient here in float32; the margin has."""
    x = torch.full((1, 2), 0.5)
    x[0, 0] += 0.2
    model = Scale(1e6)
    assert model(pgd(model, x, torch.tensor([0]), L2Ball(0.3))).argmax() == 1


def test_balls() -> None:
    with pytest.raises(ValueError, match="eps must be at least 0, got -1"):
        L2Ball(-1)
    x = torch.rand(5, 3)
    assert (L2Ball(0.0).start(x, None) == 0).all()
    pytest.importorskip("pyautoattack")
    with pytest.raises(ValueError, match=r"inputs in \[0, 1\]"):
        apgd(nn.Identity(), x, torch.zeros(5, dtype=torch.long), L2Ball(0.1, low=-1))


def test_attacks_stay_in_their_ball_whatever_the_input() -> None:
    """Inputs outside of [low, high] may move towards it, and no further than eps."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), 40 * torch.randn(20, 3, 2, 2)
    found = pgd(model, x, torch.zeros(20, dtype=torch.long), L2Ball(0.1), restarts=2)
    assert (found - x).flatten(1).norm(dim=1).max() < 0.1 * (1 + 1e-4)
    inside = torch.rand(20, 3, 2, 2)
    found = pgd(model, inside, torch.zeros(20, dtype=torch.long), L2Ball(0.5))
    assert 0 <= found.min() <= found.max() <= 1


@pytest.mark.parametrize("rounding", [True, False])
def test_bad_batches_are_refused_with_their_values(rounding: bool) -> None:
    model, x = nn.Sequential(nn.Flatten(), CayleyLinear(16, 3)), torch.rand(4, 1, 4, 4)
    labels = torch.tensor([0, 1, 2, 1])
    for bad, error, message in (
        (torch.tensor([0, 1, 2, 3]), ValueError, "labels must be from 0 to 2, got some from 0 to 3"),
        (torch.tensor([0, 1, 2, -1]), ValueError, "labels must be from 0 to 2, got some from -1 to 2"),
        (labels.float(), TypeError, r"labels must be integers, got torch\.float32"),
    ):
        with pytest.raises(error, match=message):
            certify(model, [(x, bad)], rounding=rounding)
    for value in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[0, 0, 0, 0] = value
        with pytest.raises(ValueError, match="certify takes finite inputs, got 1 entries that are not"):
            certify(model, [(spoiled, labels)], rounding=rounding)
    expected = certify(model, [(x, labels)], rounding=rounding).radius
    for dtype in (torch.uint8, torch.int16):
        assert torch.equal(certify(model, [(x, labels.to(dtype))], rounding=rounding).radius, expected)


def test_a_slack_has_one_number_for_each_example() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    for slack in (torch.zeros(4, 1), torch.zeros(3), float("nan")):
        with pytest.raises(
            ValueError, match=r"slack must be at least 0, one number or one for each of \(4,\) examples"
        ):
            certified_radius(logits, labels, 1.0, slack)


def test_logits_that_overflow_have_radius_0() -> None:
    model = nn.Sequential(CayleyLinear(4, 4, bias=False), Scale(4.0), NormalizedLinear(4, 3, bias=False))
    x = torch.full((2, 4), 1.0)
    x[1] = torch.finfo(torch.float32).max
    certificates = certify(model, [(x, torch.zeros(2, dtype=torch.long))])
    assert not certificates.logits[1].isfinite().all(), "the negative control"
    assert certificates.radius[1] == 0


def test_certify_and_verify_look_at_each_layer_once(monkeypatch) -> None:
    """The walk through the body of a head, and that of each layer, know what the walk through the model has found."""
    seen: list[nn.Module] = []
    original = bounds._figures
    monkeypatch.setattr(bounds, "_figures", lambda module, *rest: (seen.append(module), original(module, *rest))[1])
    layers = [nn.Flatten(), CayleyLinear(16, 16), MaxMin(), CayleyLinear(16, 3)]
    model, x = nn.Sequential(nn.Sequential(*layers[:3]), layers[3]).eval(), torch.rand(4, 1, 4, 4)
    assert certify(model, [(x, model(x).argmax(1))]).head == "pairwise"
    assert seen == layers
    seen.clear()
    assert verify(model, x, 1.0).faults == []
    assert seen == layers


def test_a_layer_that_stands_in_two_places_has_a_value_for_each() -> None:
    """The constants cancel at the second place, and not at the third."""
    layer = nn.Linear(1, 1).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(-1e6)
    shift = nn.Linear(1, 1).double()
    shift.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.tensor([1e6])})
    model, exact = nn.Sequential(shift, layer, layer, layer), torch.tensor([[-2e6]]).double()
    assert bounds.growth(model, (1,), torch.float64).offset >= abs(model(torch.zeros(1, 1).double())).item()
    torch.testing.assert_close(model(torch.zeros(1, 1).double()), exact)
