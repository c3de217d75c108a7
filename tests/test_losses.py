"""Losses: their definitions once more, gradients, limits, and how a recipe chooses one."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import certified_radius
from orthoconv.certificates import PairwiseConstants, pairwise_constants, pairwise_radius
from orthoconv.data import load
from orthoconv.nn import CayleyLinear, CircularConv2d, MaxMin, NormalizedLinear, Scale
from orthoconv.train import (
    OBJECTIVES,
    Recipe,
    certificate_regularizer,
    emma_loss,
    fit,
    gloro_loss,
    hinge_loss,
    hkr_loss,
    kr_loss,
    logit_annealing,
    offset_cross_entropy,
    radius_cross_entropy,
    regularized_cross_entropy,
    soft_hkr_loss,
    tau_cross_entropy,
    vra_loss,
)

EPS = 0.3


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and pairwise constants."""
    torch.manual_seed(0)
    rows = torch.randn(5, 8, dtype=torch.float64)
    logits = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    return logits, torch.randint(5, (12,)), torch.cdist(rows, rows).requires_grad_()


LOSSES = {
    "tau": lambda y, t, c: tau_cross_entropy(y, t, 3.0),
    "annealing": lambda y, t, c: logit_annealing(y, t, 0.5, 0.4, 2.5),
    "gloro": lambda y, t, c: gloro_loss(y, t, EPS, c),
    "vra": lambda y, t, c: vra_loss(y, t, EPS, 0.4, c),
    "radius": lambda y, t, c: radius_cross_entropy(y, t, EPS, 0.2, c),
    "certificate": lambda y, t, c: regularized_cross_entropy(y, t, 0.5, c),
    "kr": lambda y, t, c: kr_loss(y, t),
    "hkr": lambda y, t, c: hkr_loss(y, t, 0.7, 0.5),
    "soft_hkr": lambda y, t, c: soft_hkr_loss(y, t, 0.7, 5.0, 2.0),  # with a margin above the mean, no part is detached
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(case, name: str) -> None:
    logits, labels, constants = case
    assert torch.autograd.gradcheck(lambda y, c: LOSSES[name](y, labels, c), (logits, constants))


def by_hand(logits: Tensor, labels: Tensor, constants: Tensor):
    """Rows of logits, their class, and the rates of the other classes, one image at a time."""
    for y, t in zip(logits.tolist(), labels.tolist(), strict=True):
        yield y, t, {j: constants[t, j].item() for j in range(len(y)) if j != t}


def test_emma_by_its_definition(case) -> None:
    logits, labels, constants = case
    terms = []
    for y, t, c in by_hand(logits, labels, constants):
        raised = {j: y[j] + EPS * min(max((y[t] - y[j]) / (EPS * c[j]), 0.01), 1) * c[j] for j in c}
        terms.append(math.log(math.exp(y[t]) + sum(map(math.exp, raised.values()))) - y[t])
    loss = emma_loss(logits, labels, EPS, constants)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_emma_keeps_its_radii_out_of_the_gradient(case) -> None:
    """The gradient is that of a cross-entropy whose shifts are constants times the rates."""
    logits, labels, constants = case
    got = torch.autograd.grad(emma_loss(logits, labels, EPS, constants), (logits, constants))
    lead = (logits.gather(1, labels[:, None]) - logits).detach()
    rates = constants[labels]
    radii = (lead / rates.detach().clamp_min(1e-300)).clamp(0.01 * EPS, EPS)
    fixed = F.cross_entropy(logits + radii * rates.scatter(1, labels[:, None], 0), labels)
    for a, b in zip(got, torch.autograd.grad(fixed, (logits, constants)), strict=True):
        torch.testing.assert_close(a, b)
    assert got[1].abs().max() > 0, "the rates are trained"


def test_emma_between_cross_entropy_and_the_full_shift(case) -> None:
    logits, labels, constants = case
    torch.testing.assert_close(emma_loss(logits, labels, 1e-12, constants), F.cross_entropy(logits, labels))
    far = 100 * F.one_hot(labels, 5).double()  # a lead that no eps takes up: everyone gets all of eps
    full = offset_cross_entropy(far, labels, math.sqrt(2) * EPS, 1.0)
    torch.testing.assert_close(emma_loss(far, labels, EPS), full)
    equal = emma_loss(logits.detach() * 0 + F.one_hot(labels, 5) * 0.1, labels, EPS)
    assert equal.item() == pytest.approx(math.log(5), rel=1e-12), "rivals within reach draw level"


@pytest.mark.parametrize("loss", [emma_loss, gloro_loss, radius_cross_entropy, vra_loss])
def test_without_constants_the_bound_of_all_logits_counts(case, loss) -> None:
    logits, labels, _ = case
    every = torch.full((5, 5), math.sqrt(2) * 0.7, dtype=torch.float64)
    torch.testing.assert_close(loss(logits, labels, EPS, lipschitz=0.7), loss(logits, labels, EPS, constants=every))


def test_certificates_in_losses_are_those_of_the_certificates(case) -> None:
    logits, labels, constants = case
    radius = pairwise_radius(logits, labels, constants)
    torch.testing.assert_close(certificate_regularizer(logits, labels, constants), radius.mean())
    plain = certificate_regularizer(logits, labels, lipschitz=2.0)
    torch.testing.assert_close(plain, certified_radius(logits, labels, 2.0).mean())
    expected = F.cross_entropy(logits, labels) - 0.5 * radius.mean()
    torch.testing.assert_close(regularized_cross_entropy(logits, labels, 0.5, constants), expected)
    torch.testing.assert_close(regularized_cross_entropy(logits, labels, 0.0), F.cross_entropy(logits, labels))


def test_equal_rows_spoil_nothing(case) -> None:
    """Two classes with the same row have the constant 0; losses and gradients stay finite."""
    logits, labels, constants = case
    zero = constants.detach().clone()
    zero[0, 1] = zero[1, 0] = 0
    zero.requires_grad_()
    for loss in (emma_loss, gloro_loss, radius_cross_entropy, vra_loss):
        value = loss(logits, labels, EPS, constants=zero)
        assert value.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(value, (logits, zero)))


def test_vra_by_its_definition(case) -> None:
    logits, labels, constants = case
    terms = []
    for y, t, c in by_hand(logits, labels, constants):
        s = [max(0, EPS - (y[t] - y[j]) / c[j]) for j in c]
        total = sum(map(math.exp, s))
        soft = sum(v * math.exp(v) / total for v in s)
        terms.append(0.4 * soft - 0.6 * y[t] / math.hypot(*y))
    assert vra_loss(logits, labels, EPS, 0.4, constants).item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_radius_cross_entropy_by_its_definition(case) -> None:
    logits, labels, constants = case
    terms = []
    for y, t, c in by_hand(logits, labels, constants):
        radii = [(y[t] - y[j]) / c[j] for j in c]
        terms.append(0.2 * math.log(1 + sum(math.exp((EPS - r) / 0.2) for r in radii)))
    loss = radius_cross_entropy(logits, labels, EPS, 0.2, constants)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-12)


def test_radius_cross_entropy_is_offset_cross_entropy_for_equal_constants(case) -> None:
    logits, labels, _ = case
    every = torch.full((5, 5), 1.5, dtype=torch.float64)
    expected = offset_cross_entropy(logits, labels, 1.5 * EPS, 1.5 * 0.2) / 1.5
    torch.testing.assert_close(radius_cross_entropy(logits, labels, EPS, 0.2, every), expected)


def test_radius_cross_entropy_does_not_depend_on_the_scale_of_a_head(case) -> None:
    """Logits and constants grow together, and radii stay what they are."""
    logits, labels, constants = case
    loss = radius_cross_entropy(logits, labels, EPS, 0.2, constants)
    torch.testing.assert_close(radius_cross_entropy(3 * logits, labels, EPS, 0.2, 3 * constants), loss)


def test_radius_cross_entropy_of_an_image_does_not_depend_on_the_others(case) -> None:
    logits, labels, constants = case
    near = constants.detach().clone()
    near[0, 1] = near[1, 0] = 1e-9
    each = [radius_cross_entropy(logits[k : k + 1], labels[k : k + 1], EPS, 0.2, near) for k in range(len(labels))]
    torch.testing.assert_close(radius_cross_entropy(logits, labels, EPS, 0.2, near), torch.stack(each).mean())


def test_gloro_puts_the_extra_class_first_just_where_there_is_no_certificate(case) -> None:
    logits, _, constants = case
    top = logits.argmax(1)
    certified = pairwise_radius(logits, top, constants) > EPS
    assert 0 < certified.sum() < len(top)
    for y, t, sure in zip(logits, top, certified, strict=True):
        rest = gloro_loss(y[None], t[None], EPS, constants)
        extra = (rest.exp() * y[t].exp() - y.exp().sum()).log()  # the logit that the loss has added
        assert (extra < y[t]) == sure


def test_annealing_between_its_limits(case) -> None:
    logits, labels, _ = case
    torch.testing.assert_close(
        logit_annealing(logits, labels, 0.5, 0.4, 0.0), offset_cross_entropy(logits, labels, 0.5, 0.4)
    )
    p = ((logits - 0.5 * F.one_hot(labels, 5)) / 0.4).softmax(1).gather(1, labels[:, None])
    torch.testing.assert_close(logit_annealing(logits, labels, 0.5, 0.4, 3.0), -0.4 * ((1 - p) ** 3 * p.log()).mean())
    sure = (200 * F.one_hot(labels, 5).float()).requires_grad_()
    (gradient,) = torch.autograd.grad(logit_annealing(sure, labels, 0.5, 0.4, 0.5), sure)
    assert torch.equal(gradient, torch.zeros_like(gradient)), "an image that leads by far counts for nothing"


def test_tau_goes_from_cross_entropy_to_the_largest_lead(case) -> None:
    logits, labels, _ = case
    torch.testing.assert_close(tau_cross_entropy(logits, labels, 1.0), F.cross_entropy(logits, labels))
    best = logits.amax(1) - logits.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(tau_cross_entropy(logits, labels, 1e4), best.mean(), rtol=0, atol=1e-3)


def test_transport_by_its_definition(case) -> None:
    logits, labels, _ = case
    signed = 2 * F.one_hot(labels, 5) - 1
    kr = torch.stack([logits[labels == k, k].mean() - logits[labels != k, k].mean() for k in range(5)]).mean()
    torch.testing.assert_close(kr_loss(logits, labels), -kr)
    hinge = (0.25 - signed * logits).clamp_min(0) * torch.where(signed > 0, 4, 1)
    torch.testing.assert_close(hkr_loss(logits, labels, 0.7, 0.5), -0.3 * kr + 0.7 * hinge.mean())
    torch.testing.assert_close(hkr_loss(logits, labels, 0.0), -kr)
    score, sign = logits[:, 0], torch.where(labels > 1, 1, -1)
    distance = score[sign > 0].mean() - score[sign < 0].mean()
    binary = -0.3 * distance + 0.7 * (0.25 - sign * score).clamp_min(0).mean()
    for shaped, target in ((score, sign), (score[:, None], sign), (score, (sign + 1) // 2)):
        torch.testing.assert_close(hkr_loss(shaped, target, 0.7, 0.5), binary)
    alone = torch.zeros(3, dtype=torch.long)
    assert kr_loss(logits[:3], alone).isfinite(), "classes that the batch lacks"


def test_soft_hkr_between_the_mean_and_the_largest_of_the_others(case) -> None:
    logits, labels, _ = case
    true = logits.gather(1, labels[:, None])[:, 0]
    others = logits.scatter(1, labels[:, None], -math.inf).amax(1)
    sharp = soft_hkr_loss(logits, labels, 0.0, 1.0, 1e4)
    torch.testing.assert_close(sharp, (others - true).mean(), rtol=0, atol=1e-3)
    mean = (logits.sum(1) - true) / 4
    torch.testing.assert_close(soft_hkr_loss(logits, labels, 0.0, 1.0, 1e-9), (mean - true).mean())
    hinge = (0.5 - true).clamp_min(0) + (0.5 + others).clamp_min(0)
    torch.testing.assert_close(soft_hkr_loss(logits, labels, 1.0, 1.0, 1e4), hinge.mean(), rtol=0, atol=1e-3)


def test_the_sharpness_of_soft_hkr_is_a_constant_for_the_gradient(case) -> None:
    logits, labels, _ = case
    y = (10 * logits).detach().requires_grad_()
    fixed = 1.0 / y.detach().abs().mean()
    assert fixed < 1
    weights = (fixed * y).scatter(1, labels[:, None], -math.inf).softmax(1)
    expected = ((weights * y).sum(1) - y.gather(1, labels[:, None])[:, 0]).mean()
    got = torch.autograd.grad(soft_hkr_loss(y, labels, 0.0), y)
    torch.testing.assert_close(got, torch.autograd.grad(expected, y))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y, t: emma_loss(y, t, 0.0), "eps must be positive and finite, got 0.0"),
        (lambda y, t: emma_loss(y, t, 0.1, torch.ones(4, 5)), r"constants must have the shape \(5, 5\), got \(4, 5\)"),
        (lambda y, t: gloro_loss(y, t, 0.1, lipschitz=-1), "lipschitz must be positive and finite, got -1"),
        (lambda y, t: emma_loss(y, t[:3], 0.1), r"logits \(b, classes\) and labels \(b,\)"),
        (lambda y, t: radius_cross_entropy(y, t, -1), "eps must be positive and finite, got -1"),
        (lambda y, t: radius_cross_entropy(y, t, temperature=0), "temperature must be positive and finite, got 0"),
        (lambda y, t: vra_loss(y, t, gamma=2), "gamma must be from 0 to 1, got 2"),
        (lambda y, t: regularized_cross_entropy(y, t, -1), "gamma must be at least 0 and finite, got -1"),
        (lambda y, t: hkr_loss(y, t, 1.5), r"alpha must be from 0 to 1, got 1\.5"),
        (lambda y, t: hkr_loss(y, t, 0.5, 0), "margin must be positive and finite, got 0"),
        (lambda y, t: kr_loss(y, t[:3]), r"got \(12, 5\) and \(3,\)"),
        (lambda y, t: soft_hkr_loss(y, t, temperature=0), "temperature must be positive"),
        (lambda y, t: tau_cross_entropy(y, t, 0), "tau must be positive and finite, got 0"),
        (lambda y, t: logit_annealing(y, t, beta=-1), "beta must be at least 0 and finite, got -1"),
        (lambda y, t: hinge_loss(y, t, -1), "margin must be at least 0 and finite, got -1"),
        (lambda y, t: hinge_loss(y, t, math.nan), "margin must be at least 0 and finite, got nan"),
    ],
)
def test_refusals(case, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*case[:2])


EVERY = {
    "hinge": lambda y, t: hinge_loss(y, t, EPS),
    "offset": offset_cross_entropy,
    "tau": tau_cross_entropy,
    "annealing": logit_annealing,
    "emma": lambda y, t: emma_loss(y, t, EPS),
    "gloro": lambda y, t: gloro_loss(y, t, EPS),
    "vra": vra_loss,
    "radius": radius_cross_entropy,
    "regularizer": certificate_regularizer,
    "certificate": regularized_cross_entropy,
    "kr": kr_loss,
    "hkr": hkr_loss,
    "soft_hkr": soft_hkr_loss,
}
SEVERAL = [name for name in EVERY if name not in ("kr", "hkr")]  # the two others take one score, too


@pytest.mark.parametrize("name", EVERY)
def test_labels_that_are_no_classes_are_refused(case, name: str) -> None:
    logits, labels, _ = case
    loss, wrong = EVERY[name], labels.clone()
    for value, span in ((5, "[0-4] to 5"), (-1, "-1 to [0-4]")):
        wrong[3] = value
        with pytest.raises(ValueError, match=f"labels must be from 0 to 4, got some from {span}"):
            loss(logits, wrong)
    for dtype in (torch.float64, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"labels must be integers, got {dtype}"):
            loss(logits, labels.to(dtype))
    for shaped in (labels[:, None], F.one_hot(labels, 5), F.one_hot(labels, 5).double(), labels[:2], labels[0]):
        with pytest.raises(
            ValueError, match=rf"labels \(b,\).*, got \(12, 5\) and \({str(tuple(shaped.shape))[1:-1]}\)"
        ):
            loss(logits, shaped)
    with pytest.raises(TypeError, match=r"labels must be a tensor, got \[0, 1, "):
        loss(logits, [0, 1, *labels.tolist()])


@pytest.mark.parametrize("name", EVERY)
def test_logits_that_are_none_are_refused(case, name: str) -> None:
    logits, labels, _ = case
    loss, called = EVERY[name], "scores" if name in ("kr", "hkr") else "logits"
    with pytest.raises(TypeError, match=rf"{called} must be a tensor, got \[\["):
        loss(logits.tolist(), labels)
    with pytest.raises(TypeError, match=f"{called} must be of floating point numbers, got torch.int64"):
        loss(logits.long(), labels)
    for shaped in (logits[None], logits[:0], logits[0, 0], logits[:, :0]):
        with pytest.raises(ValueError, match=rf"the loss needs {called} .*, got \({str(tuple(shaped.shape))[1:-1]}\)"):
            loss(shaped, labels[: len(shaped)] if shaped.ndim else labels)


@pytest.mark.parametrize("name", SEVERAL)
def test_one_score_is_referred_to_the_losses_of_two_classes(case, name: str) -> None:
    """The softmax of one column is 1, and it has no rival: such a loss was 0 whatever the score."""
    logits, labels, _ = case
    for score in (logits[:, :1], logits[:, 0]):
        with pytest.raises(ValueError, match=r"got \(12,( 1)?\) and \(12,\); for one score .* kr_loss and hkr_loss"):
            EVERY[name](score, 0 * labels)


@pytest.mark.parametrize("name", EVERY)
def test_integer_labels_of_every_type_are_the_same(case, name: str) -> None:
    logits, labels, _ = case
    expected = EVERY[name](logits, labels)
    types = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]
    for dtype in types:
        assert torch.equal(EVERY[name](logits, labels.to(dtype)), expected)


def test_scores_of_two_classes_take_labels_of_every_type(case) -> None:
    """Their signs count, and floats of deel-torchlip are signs."""
    score, sign = case[0][:, 0], torch.where(case[1] > 1, 1, -1)
    for dtype in (torch.int8, torch.int32, torch.float32, torch.float64):
        assert torch.equal(hkr_loss(score, sign.to(dtype)), hkr_loss(score, sign))
    assert torch.equal(hkr_loss(score, sign > 0), hkr_loss(score, sign))


def test_binary_losses_of_deel_torchlip_are_losses_of_ours(case) -> None:
    """As docs/features.md says: `HingeMarginLoss` and `HingeMulticlassLoss` by alpha = 1, `TauBCEWithLogitsLoss`."""
    logits, labels, _ = case
    score, binary = logits[:, 0], (labels > 1).long()
    hinge = (0.25 - (2 * binary - 1) * score).clamp_min(0).mean()
    torch.testing.assert_close(hkr_loss(score, binary, 1.0, 0.5), hinge)
    true = F.one_hot(labels, 5)
    each = (0.25 - (2 * true - 1) * logits).clamp_min(0) * torch.where(true > 0, 4, 1)
    torch.testing.assert_close(hkr_loss(logits, labels, 1.0, 0.5), each.mean())
    columns = torch.stack((torch.zeros_like(score), score), 1)
    tau = F.binary_cross_entropy_with_logits(3 * score, binary.double()) / 3
    torch.testing.assert_close(tau_cross_entropy(columns, binary, 3.0), tau)


def test_the_cosine_loss_of_orthogonium_is_a_loss_of_ours(case) -> None:
    logits, labels, _ = case
    cosine = F.cosine_similarity(logits, F.one_hot(labels, 5).double()).mean()
    torch.testing.assert_close(vra_loss(logits, labels, gamma=0.0), -cosine)


@pytest.mark.parametrize(
    "call",
    [
        lambda y, t, v: hinge_loss(y, t, margin=v),
        lambda y, t, v: offset_cross_entropy(y, t, offset=v),
        lambda y, t, v: offset_cross_entropy(y, t, temperature=v),
        lambda y, t, v: tau_cross_entropy(y, t, tau=v),
        lambda y, t, v: logit_annealing(y, t, beta=v),
        lambda y, t, v: emma_loss(y, t, eps=v),
        lambda y, t, v: emma_loss(y, t, EPS, lipschitz=v),
        lambda y, t, v: gloro_loss(y, t, eps=v),
        lambda y, t, v: vra_loss(y, t, gamma=v),
        lambda y, t, v: radius_cross_entropy(y, t, eps=v),
        lambda y, t, v: regularized_cross_entropy(y, t, gamma=v),
        lambda y, t, v: hkr_loss(y, t, alpha=v),
        lambda y, t, v: soft_hkr_loss(y, t, margin=v),
    ],
)
def test_constants_that_are_no_numbers_are_refused(case, call) -> None:
    for value, given in (("a", "'a'"), (None, "None"), ([1.0], r"\[1.0\]")):
        with pytest.raises(TypeError, match=f"[a-z]+ must be a number, got {given}"):
            call(*case[:2], value)
    for value in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"[a-z]+ must be .*, got {value}"):
            call(*case[:2], value)


def test_pairwise_constants_below_zero_are_refused(case) -> None:
    logits, labels, constants = case
    for loss in (emma_loss, gloro_loss, radius_cross_entropy, vra_loss):
        with pytest.raises(ValueError, match=r"constants must be at least 0, got -\d"):
            loss(logits, labels, EPS, constants=-constants)
        with pytest.raises(TypeError, match="constants must be a tensor, got 'a'"):
            loss(logits, labels, EPS, constants="a")
    with pytest.raises(ValueError, match=r"constants must be at least 0, got -1\.5"):
        certificate_regularizer(logits, labels, constants.detach().index_fill(0, torch.tensor([2]), -1.5))
    diverged = torch.full_like(constants, math.nan)
    assert emma_loss(logits, labels, EPS, diverged).isnan(), "the training loop says which step made it so"


@pytest.mark.parametrize("name", EVERY)
def test_losses_inside_transforms(case, name: str) -> None:
    """Labels have no numbers to check there; each example by itself gives the gradient of the batch."""
    logits, labels = case[0].detach(), case[1]
    loss = EVERY[name]
    whole = torch.func.grad(loss)(logits, labels)
    torch.testing.assert_close(whole, torch.autograd.grad(loss(case[0], labels), case[0])[0])
    each = torch.func.vmap(lambda y, t: loss(y[None], t[None]))(logits, labels)
    alone = [loss(y[None], t[None]) for y, t in zip(logits, labels, strict=True)]
    torch.testing.assert_close(each, torch.stack(alone))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which torch.compile does itself
@pytest.mark.parametrize("call", [hinge_loss, emma_loss, hkr_loss, logit_annealing])
def test_losses_are_compiled_in_one_graph(case, call) -> None:
    """Also with a constant that changes, as the radius of EMMA does, and a last batch that is smaller."""
    logits, labels = case[0].detach(), case[1]
    torch.compiler.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for n, value in ((12, 0.3), (12, 0.4), (9, 0.5)):
        torch.testing.assert_close(compiled(logits[:n], labels[:n], value), call(logits[:n], labels[:n], value))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["offset", "tau", "annealing", "emma"])
def test_losses_are_exported_for_any_batch(case, name: str) -> None:
    class Loss(nn.Module):
        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            return EVERY[name](logits, labels)

    logits, labels = case[0].detach(), case[1]
    batch = {0: torch.export.Dim("b", min=2, max=100)}
    exported = torch.export.export(Loss(), (logits, labels), dynamic_shapes=(batch, batch)).module()
    torch.testing.assert_close(exported(logits[:7], labels[:7]), EVERY[name](logits[:7], labels[:7]))


# The constants of a model


def test_pairwise_constants_are_those_of_the_logits() -> None:
    """Each is the norm of the difference of two rows of the Jacobian, and the gradient reaches the weights."""
    torch.manual_seed(0)
    body = [CayleyLinear(6, 6, dtype=torch.float64), Scale(0.5)]
    model = nn.Sequential(*body, nn.Sequential(NormalizedLinear(6, 4, dtype=torch.float64), Scale(3.0)))
    constants = pairwise_constants(model, 1.5)
    J = torch.func.jacrev(model)(torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(constants, torch.cdist(J, J))
    weight = model[2][0].weight
    assert torch.autograd.grad(constants[0, 1], weight)[0][:2].abs().max() > 0
    assert pairwise_constants(nn.Sequential(nn.Linear(6, 4), MaxMin())) is None


def test_layers_without_a_promise_count_with_their_norm() -> None:
    """As found by an SVD of the whole layer; the gradient is that of the spectral norm."""
    torch.manual_seed(0)
    conv = CircularConv2d(2, 6, 3, stride=2, dtype=torch.float64)
    linear, head = nn.Linear(24, 8, dtype=torch.float64), NormalizedLinear(8, 3, dtype=torch.float64)
    with torch.no_grad():  # a clear lead of the largest singular value, so that 10 steps find it
        U, S, Vh = torch.linalg.svd(linear.weight, full_matrices=False)
        linear.weight.copy_(U @ torch.diag(S * (1 + 4 * (torch.arange(8) == 0))) @ Vh)
        conv.weight.zero_()
        conv.weight[:, :, 0, 0] = torch.outer(torch.arange(1.0, 7), torch.linspace(-1, 1, 8)).double()
    held = CayleyLinear(8, 8, dtype=torch.float64)
    model = nn.Sequential(conv, MaxMin(), nn.Flatten(), linear, held, head)
    constants = PairwiseConstants(model, (2, 4, 4), 0.5)()
    matrix = torch.func.jacrev(lambda x: conv(x).flatten())(torch.zeros(2, 4, 4, dtype=torch.float64)).flatten(1)
    norm = torch.linalg.matrix_norm(matrix, 2) * torch.linalg.matrix_norm(linear.weight, 2)
    torch.testing.assert_close(constants, norm * pairwise_constants(model, 0.5))
    expected = torch.autograd.grad(norm * pairwise_constants(model, 0.5)[0, 1], linear.weight)
    torch.testing.assert_close(torch.autograd.grad(constants[0, 1], linear.weight), expected)
    promised = nn.Sequential(held, head)
    torch.testing.assert_close(PairwiseConstants(promised, (8,))(), pairwise_constants(promised))
    assert PairwiseConstants(nn.Sequential(nn.Linear(6, 4), MaxMin()), (6,))() is None


def test_emma_holds_down_the_norms_of_free_layers(tmp_path) -> None:
    """The negative control: the cross-entropy lets them grow."""
    data, _ = load("digits")

    def trained(loss: str) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), MaxMin(), NormalizedLinear(32, 10))
        recipe = Recipe(epochs=4, batch_size=64, augment=False, loss=loss, eps0=1.0)
        figures = list(fit(model, data, recipe, tmp_path / loss))
        return torch.linalg.matrix_norm(model[1].weight, 2).item(), figures[-1]["accuracy"]

    (held, accuracy), (free, _) = trained("emma"), trained("cross_entropy")
    assert held < 0.8 * free
    assert accuracy > 0.8


def test_a_run_with_pairwise_constants_is_resumed_bit_for_bit(tmp_path) -> None:
    data, _ = load("digits")
    recipe = Recipe(epochs=1, batch_size=256, augment=False, loss="emma", checkpoint_every=2)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), MaxMin(), NormalizedLinear(16, 10))

    def stop(figures) -> None:
        if figures["step"] == 3:
            raise KeyboardInterrupt

    whole, again = model(), model()
    list(fit(whole, data, recipe, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        list(fit(model(), data, recipe, tmp_path / "c", on_step=stop))
    list(fit(again, data, recipe, tmp_path / "c", resume=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


# Recipes


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), CayleyLinear(64, 32), MaxMin(), NormalizedLinear(32, 10))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_recipe_trains_with_every_loss(tmp_path, name: str) -> None:
    model, (data, test) = network(), load("digits")
    recipe = Recipe(epochs=2, batch_size=64, augment=False, loss=name, eps0=0.2)
    figures = list(fit(model, data, recipe, tmp_path / "c"))
    assert name == "emma" or figures[-1]["loss"] < figures[0]["loss"]  # the radius of EMMA has grown
    assert (model.eval()(test.images).argmax(1) == test.labels).float().mean() > 0.8


def test_the_radius_of_emma_grows_over_the_first_half() -> None:
    recipe = Recipe(loss="emma", eps0=0.4)
    radii = [recipe.constants(t).eps for t in (0.0, 0.1, 0.25, 0.5, 0.9)]
    assert radii == pytest.approx([0.04, 0.112, 0.22, 0.4, 0.4])
    assert all(a <= b for a, b in pairwise(radii))
    assert replace(recipe, eps_rise=0.0).constants(0.0).eps == 0.4
    assert replace(recipe, loss="gloro").constants(0.0).eps == 0.4


def test_a_recipe_has_the_constants_of_its_loss_alone() -> None:
    old = {
        "epochs",
        "batch_size",
        "lr",
        "loss",
        "eps0",
        "margin_factor",
        "lipschitz",
        "augment",
        "project_every",
        "seed",
    }
    for name, objective in OBJECTIVES.items():
        assert Recipe(loss=name).settings.keys() == old | set(objective.fields)
    assert OBJECTIVES["emma"].fields == ("eps_rise",)


def test_a_loss_uses_the_constants_of_the_recipe(case) -> None:
    logits, labels, constants = case
    recipe = Recipe(offset=0.5, temperature=0.5, alpha=0.6, beta=2.0, gamma=0.3, eps0=EPS, lipschitz=0.7, eps_rise=0.0)
    margin = 0.7 * EPS
    expected = {
        "hinge": hinge_loss(logits, labels, margin),
        "cross_entropy": F.cross_entropy(logits, labels),
        "offset_cross_entropy": offset_cross_entropy(logits, labels, 0.5, 0.5),
        "tau_cross_entropy": tau_cross_entropy(logits, labels, 2.0),
        "logit_annealing": logit_annealing(logits, labels, 0.5, 0.5, 2.0),
        "emma": emma_loss(logits, labels, EPS, constants),
        "gloro": gloro_loss(logits, labels, EPS, constants),
        "vra": vra_loss(logits, labels, EPS, 0.3, constants),
        "radius_cross_entropy": radius_cross_entropy(logits, labels, EPS, 0.5, constants),
        "certificate": regularized_cross_entropy(logits, labels, 0.3, constants),
        "hkr": hkr_loss(logits, labels, 0.6, margin),
        "soft_hkr": soft_hkr_loss(logits, labels, 0.6, margin),
    }
    assert expected.keys() == OBJECTIVES.keys()
    for name, value in expected.items():
        got = OBJECTIVES[name].loss(logits, labels, replace(recipe, loss=name).constants(0.0), constants)
        torch.testing.assert_close(got, value)
