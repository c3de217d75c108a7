"""Local certificates: the lemma, the inequality around an image, the proof for a ball, and `certify`."""

import inspect
import math

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certify, lipschitz_bound, predict
from orthoconv import nn as layers
from orthoconv.certificates import local
from orthoconv.certificates.branches import Branch, branches_of, require_sum
from orthoconv.certificates.double import in_double
from orthoconv.nn import (
    CayleyConv2d,
    CayleyLinear,
    Ensemble,
    Gain,
    InvertibleDownsample,
    IsometryAverage,
    MaxMin,
    Normalize,
    NormalizedLinear,
    ShiftConv2d,
)  # fmt: skip


def plane(width: int = 16, classes: int = 3) -> nn.Sequential:
    """A network of the plane, where every claim about a disc can be looked at."""
    return nn.Sequential(
        CayleyLinear(2, width), MaxMin(), CayleyLinear(width, width), MaxMin(), NormalizedLinear(width, classes)
    )


def images() -> nn.Sequential:
    return nn.Sequential(
        Normalize([0.5], [1.0]), InvertibleDownsample(2), CayleyConv2d(4, 8, 3), MaxMin(),
        CayleyConv2d(8, 6, 2, stride=2), MaxMin(), nn.Flatten(), CayleyLinear(24, 8), MaxMin(), NormalizedLinear(8, 4),
    )  # fmt: skip


def mean() -> nn.Sequential:
    return nn.Sequential(IsometryAverage(nn.Sequential(Ensemble([images(), images()]))))


def branches(model: nn.Module, shape: tuple[int, ...], factor: float = 1.0) -> list[Branch]:
    model.eval()
    return branches_of(model, in_double(model), lambda part: factor * lipschitz_bound(part, shape))


MODELS = {"plane": (plane, (2,)), "images": (images, (1, 8, 8)), "mean": (mean, (1, 8, 8))}


def exact_margin(twin: nn.Module, x: Tensor, labels: Tensor, others: Tensor) -> Tensor:
    y = twin(x)
    return (y.gather(1, labels[:, None]) - y.gather(1, others[:, None]))[:, 0]


@pytest.mark.parametrize("rho", [1e-3, 0.1, 10.0])
def test_the_lemma(rho: float) -> None:
    """For every s, g (|d + s| - d - theta s) <= lambda s^2 + g^2 (1 - theta)^2 / (4 lambda); some s come near."""
    source = torch.Generator().manual_seed(0)
    g = torch.randn(4, 50, generator=source, dtype=torch.float64)
    d = torch.rand(4, 50, generator=source, dtype=torch.float64) ** 3
    d[:, 0] = 0
    norms = torch.full((4,), rho, dtype=torch.float64)
    theta, lam, cost = local.slopes(g, d, norms)
    assert bool(((theta >= 0) & (theta <= 1)).all())
    s = torch.cat([torch.linspace(-3, 3, 6001), torch.linspace(-1e-2, 1e-2, 2001)]).double()[:, None, None]
    gained = g * ((d + s).abs() - d - theta * s) - lam[:, None] * s**2
    allowed = g.clamp_min(0) ** 2 * (1 - theta) ** 2 / (4 * lam[:, None])
    assert bool((gained <= allowed + 1e-15).all())
    assert torch.allclose(allowed.sum(1), cost)
    assert bool((gained.amax(0) > 0.9 * allowed).any(1).all()), "no slack that could hide an error"
    worse = [local.slopes(g, d, factor * norms) for factor in (0.8, 1.25)]
    for _, other, its_cost in worse:  # the best lambda for rho
        assert bool((lam * rho**2 + cost <= (other * rho**2 + its_cost) * (1 + 1e-3)).all())


@pytest.mark.parametrize("name", MODELS)
def test_branches_are_the_model(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.rand(3, *shape, dtype=torch.float64)
    parts = branches(model, shape)
    assert sum(part.share for part in parts) == pytest.approx(1)
    total = torch.zeros(())
    for part in parts:
        y = part.segments[0](x)
        for sort, segment in zip(part.sorts, part.segments[1:], strict=True):
            y = segment(sort(y))
        total = total + part.share * y
    assert torch.allclose(total, in_double(model)(x), atol=1e-12)


def largest_violation(model: nn.Module, shape: tuple[int, ...], factor: float) -> float:
    """By how much, at most, the margin falls more than the tangent allows, found by ascent from many points."""
    source = torch.Generator().manual_seed(1)
    b = 32
    x = torch.rand(b, *shape, generator=source, dtype=torch.float64)
    labels, others = torch.zeros(b, dtype=torch.long), torch.ones(b, dtype=torch.long)
    tangent = local._tangent(branches(model, shape, factor), x, labels, others, torch.full((b,), 0.5))
    norms = torch.rand(b, generator=source, dtype=torch.float64)
    delta = torch.randn(b, *shape, generator=source, dtype=torch.float64).flatten(1)
    delta = (delta / delta.norm(dim=1, keepdim=True) * norms[:, None]).view_as(x)
    worst, twin = -math.inf, in_double(model)
    for _ in range(40):
        delta.requires_grad_()
        fall = tangent.margin - exact_margin(twin, x + delta, labels, others)
        linear = (tangent.slope * delta).flatten(1).sum(1)
        over = fall - linear - tangent.quadratic * delta.flatten(1).square().sum(1) - tangent.constant
        worst = max(worst, over.max().item())
        (gradient,) = torch.autograd.grad(over.sum(), delta)
        delta = (delta + 0.05 * gradient).detach()
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_no_perturbation_decreases_the_margin_by_more(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    assert largest_violation(make(), shape, 1.0) <= 1e-12


def test_bounds_that_are_too_small_are_found_out() -> None:
    """The same search, for a tangent that counts with a quarter of the Lipschitz bounds."""
    torch.manual_seed(0)
    assert largest_violation(plane(), (2,), 0.25) > 1e-3


def distances(model: nn.Module, x: Tensor, labels: Tensor, reach: float) -> Tensor:
    """Smallest distance at which a dense grid of directions and distances finds another class, (b,)."""
    angles = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)[:-1]
    steps = torch.linspace(0, reach, 301, dtype=torch.float64)[1:]
    moves = torch.stack((angles.cos(), angles.sin()), 1)[None] * steps[:, None, None]  # (steps, angles, 2)
    found, twin = [], in_double(model)
    for one, label in zip(x, labels, strict=True):
        changed = (twin(one + moves.view(-1, 2)).argmax(1) != label).view(len(steps), -1).any(1)
        found.append(steps[changed][0] if changed.any() else torch.tensor(math.inf))
    return torch.stack(found)


@torch.no_grad()
def test_what_is_proven_of_a_disc_is_true() -> None:
    """And it is more than the Lipschitz bound proves."""
    proven, before, false = 0, 0, 0
    for seed in (3, 6):  # which have many points near another class
        torch.manual_seed(seed)
        model = plane().eval()
        parts, x = branches(model, (2,)), 0.3 * torch.randn(20, 2).double()
        labels = in_double(model)(x).argmax(1)
        true, known = distances(model, x, labels, 0.6), certify(model, [(x.float(), labels)]).radius
        for radius in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
            fine = torch.ones(20, dtype=torch.bool)
            for j in range(3):
                other = torch.full_like(labels, j)
                fine &= (labels == j) | local.holds(
                    parts, x, labels, other, torch.full_like(x[:, 0], radius), torch.zeros_like
                )
            assert not bool((fine & (true <= radius)).any())
            proven, before = proven + int(fine.sum()), before + int((known > radius).sum())
            false += int((true <= radius).sum())
    assert proven > 1.1 * before
    assert false > 10, "discs with another class inside, of which none may be proven"


def test_certify() -> None:
    """Radii grow to the levels that are proven, and attacks inside them fail."""
    torch.manual_seed(0)
    model = mean()
    x = torch.rand(40, 1, 8, 8)
    labels = model.eval()(x).argmax(1)
    eps = [0.003 * k for k in range(1, 12)]
    before, after = (certify(model, [(x, labels)], eps, local=choice) for choice in (False, True))
    assert before.by_lipschitz is None
    assert torch.equal(after.by_lipschitz, before.radius)
    assert after.certified_by_lipschitz == before.certified_accuracy
    assert bool((after.radius >= before.radius).all())
    grown = after.radius > before.radius
    assert int(grown.sum()) > 5
    levels = torch.tensor(eps)[:, None]
    assert bool(((after.radius[grown] / levels - 1 - 1e-6).abs() < 1e-6).any(0).all())
    assert sum(after.certified_accuracy.values()) > sum(before.certified_accuracy.values())
    twin, start = in_double(model), x[grown].double()
    radius, target = after.radius[grown].double().view(-1, 1, 1, 1), labels[grown]
    delta = torch.zeros_like(start)
    for _ in range(50):
        delta.requires_grad_()
        y = twin(start + delta)
        best = y.scatter(1, target[:, None], -math.inf).amax(1)
        (gradient,) = torch.autograd.grad((best - y.gather(1, target[:, None])[:, 0]).sum(), delta)
        delta = (delta + 0.1 * radius * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).detach()
        norms = delta.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        delta = delta * (radius / norms).clamp_max(1)
        assert bool((twin(start + delta).argmax(1) == target).all())


def test_predict() -> None:
    """Radii grow in steps of a twentieth; a wrong radius would not be larger than the distance of another class."""
    torch.manual_seed(0)
    model, x = images(), torch.rand(2, 1, 8, 8)
    before, after = predict(model, x), predict(model, x, local=True)
    growth = after.radius / before.radius
    assert torch.equal(after.index, before.index)
    assert bool((growth >= 1).all())
    assert float(growth.max()) > 1.1
    for k in range(2):
        assert after[k].radius == pytest.approx(
            certify(model, [(x[k : k + 1], after.index[k : k + 1])], [float(after.radius[k]) / (1 + 2e-6)], local=True)
            .radius.item(), rel=1e-5,
        )  # fmt: skip


def test_radii_that_grow_by_steps_are_proven_at_each_step() -> None:
    """The radius of a step is one that `certify` also proves if it is asked for it, and the next one it does not."""
    torch.manual_seed(1)
    model, x = images(), torch.rand(3, 1, 8, 8)
    labels = model.eval()(x).argmax(1)
    before, after = (certify(model, [(x, labels)], local=choice) for choice in (False, 0.1))
    steps = (after.radius / before.radius).double().log() / math.log(1.1)
    assert bool((steps > 0.5).any()), "none grew"
    assert torch.allclose(steps, steps.round(), atol=1e-4)
    assert torch.equal(after.by_lipschitz, before.radius)
    for k in range(2):
        again = [(x[k : k + 1], labels[k : k + 1])]
        here, beyond = (float(before.radius[k]) * 1.1 ** (round(float(steps[k])) + s) for s in (-1e-3, 1.0))
        assert certify(model, again, [here], local=True).certified_accuracy[here] == 1
        assert certify(model, again, [beyond], local=True).certified_accuracy[beyond] == 0


@pytest.mark.parametrize("step", [1, 0.0, 1.5, -0.1, "0.1", None, math.nan])
def test_steps_that_are_refused(step) -> None:
    with pytest.raises(ValueError, match=r"local must be True, False or a share of a radius such as 0\.05, got"):
        certify(plane(), [(torch.rand(1, 2), torch.tensor([0]))], local=step)


KINDS = [n for n in layers.__all__ if n.endswith(("Conv2d", "ConvTranspose2d", "Linear"))]


@pytest.mark.parametrize("name", [n for n in KINDS if not inspect.isabstract(getattr(layers, n))])
def test_layers_that_are_taken_are_affine(name: str) -> None:
    """f(x) + f(y) - f(0) = f(x + y) for each kind of convolution and linear layer, or it is refused."""
    make, dense = getattr(layers, name), name.endswith("Linear")
    layer = (make(8, 8) if dense else make(8, 8, 3)).double().eval()
    x, y = torch.randn(2, 3, 8, *(() if dense else (6, 6)), dtype=torch.float64)
    with torch.no_grad():
        differs = not torch.allclose(layer(x) + layer(y) - layer(torch.zeros_like(x)), layer(x + y), atol=1e-9)
    model = nn.Sequential(layer, MaxMin(), nn.Flatten(), CayleyLinear(x[0].numel(), 2))
    if not differs:
        assert len(branches_of(model, model, lambda part: 1.0)) == 1
    else:
        with pytest.raises(TypeError, match=name):
            branches_of(model, model, lambda part: 1.0)


def test_models_without_local_certificates() -> None:
    x, labels = torch.rand(2, 8), torch.zeros(2, dtype=torch.long)
    smooth = nn.Sequential(CayleyLinear(8, 8), nn.ReLU(), CayleyLinear(8, 3))
    with pytest.raises(TypeError, match=r"for affine layers and MaxMin in an nn\.Sequential, got ReLU"):
        certify(smooth, [(x, labels)], local=True)
    later = nn.Sequential(Ensemble([CayleyLinear(8, 8), CayleyLinear(8, 8)]), MaxMin(), CayleyLinear(8, 3))
    with pytest.raises(TypeError, match="got MaxMin after a mean"):
        certify(later, [(x, labels)], local=True)
    with pytest.raises(ValueError, match="local needs rounding=True and no lipschitz, got rounding=False"):
        certify(plane(), [(x[:, :2], labels)], local=True, rounding=False)
    with pytest.raises(ValueError, match=r"got rounding=True, lipschitz=1\.0"):
        certify(plane(), [(x[:, :2], labels)], lipschitz=1.0, local=True)


def test_a_mean_of_means_with_maxmin_between() -> None:
    """f of a mean is not the mean of f: here the second would certify 0.55, where a step of 0.28 reaches the border."""
    first, second = (nn.Linear(2, 2) for _ in range(2))
    last = nn.Linear(2, 2)
    with torch.no_grad():
        for layer, bias in ((first, 3.0), (second, -3.0)):
            layer.weight.copy_(torch.eye(2))
            layer.bias.copy_(torch.tensor([bias, 0.0]))
        last.weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        last.bias.copy_(torch.tensor([-1.5, 0.0]))
    model = nn.Sequential(Ensemble([first, second]), Ensemble([nn.Sequential(MaxMin(), last)]))
    with pytest.raises(TypeError, match="got MaxMin after a mean"):
        certify(model, [(torch.tensor([[1.9, 0.0]]), torch.tensor([0]))], [0.55], local=True)


def test_a_layer_that_is_two_in_float64() -> None:
    """Layers and their twins stay together, though the twin of a shift with a position is a row of two modules."""
    torch.manual_seed(0)
    model = nn.Sequential(ShiftConv2d(2, 4, 3, position=(4, 4)), MaxMin(), nn.Flatten(), NormalizedLinear(64, 3))
    (branch,) = branches(model, (2, 4, 4))
    assert len(branch.segments) == 2
    x = torch.rand(3, 2, 4, 4, dtype=torch.float64)
    require_sum([branch], in_double(model), x, lambda norms: 1e-12 * norms)
    wrong = branch._replace(share=0.9)
    with pytest.raises(TypeError, match="are not what it computes"):
        require_sum([wrong], in_double(model), x, lambda norms: 1e-12 * norms)


def test_hooks_that_change_gradients_are_refused() -> None:
    x, labels = torch.rand(2, 2), torch.zeros(2, dtype=torch.long)
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        model = nn.Sequential(nn.Linear(2, 4), MaxMin(), nn.Linear(4, 2))
        getattr(model[0], register)(lambda *args: None)
        with pytest.raises(TypeError, match="Linear has backward hooks; remove them"):
            certify(model, [(x, labels)], local=True)
    handle = nn.modules.module.register_module_full_backward_hook(lambda *args: None)
    try:
        with pytest.raises(TypeError, match="all modules has backward hooks"):
            branches_of(plane(), plane(), lambda part: 1.0)
    finally:
        handle.remove()


def test_inference_mode_and_no_linear_layer_at_the_end() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(plane(), Gain((3,))).eval()
    x = torch.randn(8, 2)
    labels, eps = model(x).argmax(1), [0.01 * k for k in range(1, 30)]
    outside = certify(model, [(x, labels)], eps, local=True)
    with torch.inference_mode():
        inside = certify(model, [(x.clone(), labels)], eps, local=True)
    assert outside.head == "lipschitz"
    assert torch.equal(inside.radius, outside.radius)
    assert bool((outside.radius > outside.by_lipschitz).any())


def test_an_image_at_which_nothing_changes() -> None:
    """A model that is constant near an image has the gradient 0; then any axis will do."""
    model = nn.Sequential(nn.Linear(2, 4), MaxMin(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model[2].bias.copy_(torch.tensor([1.0, 0.0]))
    certificates = certify(model, [(torch.rand(3, 2), torch.zeros(3, dtype=torch.long))], [0.5], local=True)
    assert certificates.certified_accuracy == {0.5: 1.0}
