"""Everything on another device: the numbers of the CPU, no mixture of devices, few kernels, and no waiting."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import CASES, CORE, LAYERS, Case
from pretend import NAME, Remote, counted, visible
from torch import Tensor, nn

import orthoconv
from orthoconv import budget, certify, export, frozen, linalg, lipschitz_bound, models, verify
from orthoconv.attacks import L2Ball, apgd, cross_examine, empirical_lipschitz, pgd
from orthoconv.data import Split
from orthoconv.data.batching import augment, generator
from orthoconv.elimination import cholesky
from orthoconv.nn import CayleyConv2d, CircularConv2d, MaxMin, conv_methods, linear_methods
from orthoconv.nn.methods import conv_method, linear_method
from orthoconv.train import OBJECTIVES, CriticRecipe, Recipe, TrainingError, fit, wasserstein_distance

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # kernels of two devices add in another order


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with visible():
        yield


def there(module: nn.Module) -> nn.Module:
    """The same module on the other device."""
    return copy.deepcopy(module).to(NAME)


def step(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and gradients of the input and of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    return y, [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_same(module: nn.Module, x: Tensor) -> None:
    """Forward, backward and eval mode agree with the CPU and stay on the device; training waits for nothing.

    They are compared in float64, since some layers take more iterations on an accelerator than where they may look.
    """
    module, x = module.double(), x.double()
    other = there(module)
    y, gradients = step(module, x)
    moved = x.to(NAME)
    with counted() as usage:
        z, others = step(other, moved)
    assert not usage.syncs, usage.syncs
    for a, b in zip([y, *gradients], [z, *others], strict=True):
        assert isinstance(b, Remote)
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-9, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(x.to(NAME)).cpu(), module.eval()(x), rtol=1e-9, atol=1e-10)


def digits(n: int = 60, size: int = 8) -> Split:
    images = torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(1))
    return Split(images, torch.arange(n) % 10)


def small_network(method: str = "cayley") -> nn.Sequential:
    torch.manual_seed(0)
    conv, linear = conv_method(method), linear_method(method, method)
    layers = [conv(1, 4, 3), MaxMin(), conv(4, 8, 3, stride=2), MaxMin(), nn.Flatten(), linear(128, 10)]
    return nn.Sequential(orthoconv.nn.Normalize([0.5]), *layers)


def test_the_device_mixes_with_no_other() -> None:
    near, far = torch.ones(3), torch.ones(3, device=NAME)
    assert far.device.type == NAME
    for mixture in (
        lambda: near + far,
        lambda: torch.cat((near, far)),
        lambda: far.add_(near),
        lambda: torch.where(near > 0, far, far),
        lambda: torch.randn(2, device=NAME, generator=torch.Generator()),
        lambda: nn.Linear(3, 3)(far),
    ):
        with pytest.raises(RuntimeError):
            mixture()
    assert isinstance(far + 1, Remote)
    assert isinstance(far * torch.tensor(2.0), Remote), "as on a GPU, a number may be on the CPU"


def test_the_device_counts_kernels_and_waits() -> None:
    x = torch.ones(3, 4, device=NAME)
    with counted() as usage:
        y = (x.view(4, 3) + 1).view(-1) * 2
    assert dict(usage.kernels) == {"add": 1, "mul": 1}
    waits: list[Callable[[], Any]] = [
        lambda: y.sum().item(), y.cpu, lambda: bool((y > 0).any()), lambda: torch.equal(y, y), lambda: y[y > 0],
        lambda: torch.linalg.inv(torch.eye(2, device=NAME)), y.nonzero,
    ]  # fmt: skip
    for wait in waits:
        with counted() as usage:
            wait()
        assert usage.syncs.total() == 1
    with counted() as usage:
        torch.ones(3).to(NAME)
    assert not usage.syncs


class CallsTheCPU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu() * 2


class HasAConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ones = torch.ones(4)  # not a buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.ones


class MakesAConstant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[-1])


@pytest.mark.parametrize("wrong", [CallsTheCPU, HasAConstant, MakesAConstant])
def test_a_layer_that_leaves_the_device_is_found(wrong: type[nn.Module]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same(nn.Sequential(wrong()), torch.randn(2, 4))


@pytest.mark.parametrize("name", conv_methods())
def test_every_method_of_convolutions(name: str) -> None:
    assert_same(conv_method(name)(4, 6, 3), torch.randn(2, 4, 6, 6))


@pytest.mark.parametrize("name", linear_methods())
def test_every_method_of_linear_layers(name: str) -> None:
    for i, o in ((6, 4), (4, 6), (5, 5)):
        assert_same(linear_method(name, "cayley")(i, o), torch.randn(3, i))


@pytest.mark.parametrize("norm", [*(pytest.param(norm, marks=pytest.mark.slow) for norm in (1e-3, 1.0)), 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bro", "lot", "soc"])
def test_a_fixed_number_of_steps_is_as_accurate(name: str, dtype: torch.dtype, norm: float) -> None:
    for i, o in ((6, 6), (3, 6), (6, 3)):
        layer = conv_method(name)(i, o, 3, dtype=dtype)
        with torch.no_grad():
            layer.weight.mul_(-norm / layer.weight.norm())
        other, atol = there(layer), 1e-10 if dtype == torch.float64 else 2e-6 * math.sqrt(max(i, o))
        assert (other.singular_values((9, 8)).cpu() - 1).abs().max() <= atol
        if dtype == torch.float64:
            assert_same(layer, torch.randn(2, i, 9, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.complex64])
@pytest.mark.parametrize("norm", [0.0, 1e-3, 1.0, 1e3, 1e30])
def test_exponentials_of_any_norm_wait_for_nothing(norm: float, dtype: torch.dtype) -> None:
    W = (norm * torch.randn(3, 5, 5, dtype=dtype) / 3).to(NAME).requires_grad_()
    with counted() as usage:
        Q = linalg.skew_exponential(W)
        (gradient,) = torch.autograd.grad(Q, W, torch.ones_like(Q))
    assert not usage.syncs
    assert torch.isfinite(gradient.cpu()).all()
    eps = torch.finfo(dtype).eps
    assert (torch.linalg.svdvals(Q.detach().cpu().to(torch.complex128)) - 1).abs().max() <= 10 * 5 * eps
    if norm <= 1e3:
        near = W.detach().cpu().requires_grad_()
        expected = linalg.skew_exponential(near)
        torch.testing.assert_close(Q.detach().cpu(), expected.detach(), atol=50 * eps * max(1, norm), rtol=0)
        (other,) = torch.autograd.grad(expected, near, torch.ones_like(expected))
        torch.testing.assert_close(gradient.cpu(), other, atol=500 * eps * max(1, norm), rtol=0)


def test_a_factor_that_does_not_exist_is_not_a_number() -> None:
    M = torch.stack((4 * torch.eye(2), -torch.eye(2))).to(NAME)
    with counted() as usage:
        L = cholesky(M)
    assert not usage.syncs
    assert torch.equal(L[0].cpu(), 2 * torch.eye(2))
    assert L[1].cpu().isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[k] for k in sorted(CORE)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_cases_of_the_contract(name: str, case: Case) -> None:
    layer = LAYERS[name].layer(case, torch.float32)
    assert_same(layer, torch.randn(2, *LAYERS[name].input_shape(case)))


@pytest.mark.parametrize(
    "module",
    [
        MaxMin(),
        orthoconv.nn.GroupSort(4),
        orthoconv.nn.Normalize([0.5] * 4, [0.2] * 4),
        orthoconv.nn.ScaledAvgPool2d(2),
        orthoconv.nn.ConvexResidual(CayleyConv2d(4, 4, 3)),
        orthoconv.nn.IsometryAverage(CircularConv2d(4, 4, 3)),
        nn.Sequential(CayleyConv2d(4, 16, 3, padding_mode="zeros"), CayleyConv2d(16, 4, 20)),
        CayleyConv2d(4, 4, 3, signs="random"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_parts(module: nn.Module) -> None:
    assert_same(module, torch.randn(2, 4, 10, 10))


@pytest.mark.parametrize(
    ("name", "conv"),
    [
        ("kwlarge", "cayley"),
        *(pytest.param("kwlarge", c, marks=pytest.mark.slow) for c in conv_methods()),
        *(pytest.param(n, c, marks=pytest.mark.slow) for n in models.NETWORKS for c in ("aol", "bcop", "cayley")),
    ],
)
def test_every_network(name: str, conv: str) -> None:
    size, classes = (32, 1) if name == "critic" else (max(16, models.NETWORKS[name].divisor), 4)
    network = models.build(name, conv=conv, width=0.125, image_size=size, classes=classes)
    assert_same(network, torch.rand(2, 3, size, size))


def test_operators_inverses_and_export_stay_on_the_device() -> None:
    layer, x = CayleyConv2d(3, 3, 3), torch.rand(2, 3, 6, 6)
    other = there(layer)
    torch.testing.assert_close(other.inverse(other(x.to(NAME))).detach().cpu(), x, **CLOSE)
    torch.testing.assert_close(other.singular_values((6, 6)).cpu(), layer.singular_values((6, 6)), **CLOSE)
    network = small_network().eval()
    images = digits(4).images
    plain = export(there(network), (1, 8, 8))
    torch.testing.assert_close(plain(images.to(NAME)).cpu(), network(images).detach(), **CLOSE)
    assert lipschitz_bound(there(network), (1, 8, 8)) == pytest.approx(lipschitz_bound(network, (1, 8, 8)))
    resnet = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).to(NAME)
    converted = orthoconv.convert(resnet, (3, 8, 8))
    assert isinstance(converted(torch.rand(1, 3, 8, 8, device=NAME)), Remote)


@pytest.mark.parametrize("placed", ["near", pytest.param("there", marks=pytest.mark.slow)])
def test_certify_verify_and_attacks_follow_the_model(placed: str) -> None:
    network, (x, y) = small_network().eval().requires_grad_(False), digits(6)
    other = there(network)
    y = network(x).argmax(1)
    here = (x.to(NAME), y.to(NAME)) if placed == "there" else (x, y)
    kind = Remote if placed == "there" else Tensor
    expected, found = certify(network, [(x, y)]), certify(other, [here])
    assert type(found.radius) is kind
    torch.testing.assert_close(found.radius.cpu(), expected.radius, **CLOSE)
    torch.testing.assert_close(found.logits.cpu(), expected.logits, **CLOSE)
    assert found.certified_accuracy == expected.certified_accuracy
    one, two = verify(network, x, claimed=2.0), verify(other, here[0], claimed=2.0)
    assert not two.faults
    assert [f.largest for f in two.layers] == pytest.approx([f.largest for f in one.layers], rel=1e-6)
    source = [torch.Generator().manual_seed(0) for _ in range(4)]
    for model, data, k in ((network, (x, y), 0), (other, here, 1)):
        adversarial = pgd(model, *data, L2Ball(0.5), generator=source[k])
        ratios = empirical_lipschitz(model, data[0], 0.5, generator=source[2 + k])
        if k == 0:
            first = adversarial, ratios
    assert type(adversarial) is type(ratios) is kind
    torch.testing.assert_close(adversarial.cpu(), first[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ratios.cpu(), first[1], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_apgd_and_cross_examination_follow_the_model() -> None:
    network, (x, y) = small_network().eval().requires_grad_(False), digits(8)
    other, y = there(network), network(x).argmax(1)
    one, two = (apgd(model, x, y, L2Ball(0.3), iterations=5) for model in (network, other))
    assert type(two) is Tensor
    assert (two - x).flatten(1).norm(dim=1).max() <= 0.3 + 1e-5
    assert ((other(two.to(NAME)).argmax(1).cpu() == y) == (network(one).argmax(1) == y)).all()
    radius = certify(other, [(x, y)]).radius
    assert not cross_examine(other, x, y, radius, iterations=5, restarts=1).any()


def test_augmentation_and_training_give_the_weights_of_the_cpu(tmp_path: Path) -> None:
    data = digits()
    moved = augment(data.images.to(NAME), generator(0, 1, 2))
    assert torch.equal(moved.cpu(), augment(data.images, generator(0, 1, 2)))
    network = small_network()
    other, recipe = there(network), Recipe(epochs=2, batch_size=20, checkpoint_every=2)
    for model, name in ((network, "near"), (other, "there")):
        figures = list(fit(model, data, recipe, tmp_path / name))
        if name == "near":
            expected = figures
    assert [f["loss"] for f in figures] == pytest.approx([f["loss"] for f in expected], rel=1e-4)
    for p, q in zip(network.parameters(), other.parameters(), strict=True):
        assert isinstance(q, Remote)
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-3, atol=1e-4)
    again = there(small_network())
    list(fit(again, data, recipe, tmp_path / "near", resume=True))
    torch.testing.assert_close(again[1].weight.detach().cpu(), network[1].weight.detach())


def test_a_step_of_training_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, network, calls = digits(50), there(small_network()), []
    monkeypatch.setattr(budget, "READ_EVERY", 4)
    run = fit(network, data, Recipe(epochs=1, batch_size=5), tmp_path / "c", on_step=lambda f: calls.append(f["step"]))
    with counted() as usage:
        next(run)
    assert calls == [4, 8, 10]
    copied = sum(1 for _ in network.state_dict()) + 3 * sum(1 for _ in network.parameters())
    assert usage.syncs.total() <= 2 * len(calls) + copied, "figures that are read, and one checkpoint"
    assert set(usage.syncs) == {"_to_copy"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_wait_for_nothing(name: str) -> None:
    """They check the values of labels and of constants on a CPU alone."""
    logits, labels, rows = torch.randn(6, 5).double(), torch.randint(5, (6,)), torch.randn(5, 8).double()
    constants, numbers = torch.cdist(rows, rows), Recipe(loss=name).constants(0.5)
    loss = OBJECTIVES[name].loss
    moved = [t.to(NAME) for t in (logits, labels, constants)]
    with counted() as usage:
        value = loss(moved[0], moved[1], numbers, moved[2])
    assert not usage.syncs, usage.syncs
    torch.testing.assert_close(value.cpu(), loss(logits, labels, numbers, constants))


def test_a_step_that_is_not_finite_is_named_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, network = digits(100), there(small_network("plain"))
    monkeypatch.setattr(budget, "READ_EVERY", 6)
    run = fit(network, data, Recipe(epochs=1, batch_size=5, lr=1e38), tmp_path / "c")
    with pytest.raises(TrainingError, match=r"step [1-5]: the loss is .*largest gradient is that of .*no checkpoint"):
        next(run)
    assert not (tmp_path / "c").exists()


def test_large_data_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "DATA_BYTES", 1)
    (figures,) = fit(there(small_network()), digits(), Recipe(epochs=1, batch_size=20), tmp_path / "c")
    (expected,) = fit(small_network(), digits(), Recipe(epochs=1, batch_size=20), tmp_path / "d")
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_the_wasserstein_distance_follows_the_critic() -> None:
    p, q = digits(40, 32).images, digits(40, 32).images + 0.1
    found = []
    for device in ("cpu", NAME):
        torch.manual_seed(0)
        critic = models.build("critic", width=0.0625, classes=1, in_channels=1).to(device)
        found.append(wasserstein_distance(critic, p, q, CriticRecipe(steps=3, batch_size=8)))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


SIZES = [
    *((64, 64, 3, n, {}) for n in (8, 16, 32)), (3, 32, 3, 32, {}), (128, 64, 3, 16, {}), (16, 64, 5, 12, {}),
    (32, 32, 4, 16, {"stride": 2}), (32, 64, 3, 9, {"groups": 4}), (64, 32, 3, 16, {"groups": 8}),
    (8, 8, 3, 10, {"padding_mode": "zeros"}), (200, 200, 3, 6, {}), (12, 12, 3, 64, {}),
]  # fmt: skip


@pytest.mark.parametrize(("i", "o", "k", "n", "options"), SIZES)
def test_cayley_launches_few_kernels(i: int, o: int, k: int, n: int, options: dict[str, Any]) -> None:
    layer, x = there(CayleyConv2d(i, o, k, **options)), torch.randn(4, i, n, n, device=NAME, requires_grad=True)
    layer(x)  # constants are moved to the device
    with counted() as forward:
        y = layer(x)
    grad = torch.ones_like(y)
    with counted() as backward:
        y.backward(grad)
    assert forward.kernels.total() <= 40
    assert backward.kernels.total() <= 45
    assert not forward.syncs | backward.syncs


def test_kwlarge_launches_few_kernels_and_waits_for_nothing() -> None:
    network, x = there(models.build("kwlarge")), torch.rand(4, 3, 32, 32, device=NAME)
    with counted() as forward:
        y = network(x).sum()
    with counted() as backward:
        y.backward()
    assert forward.kernels.total() <= 200
    assert backward.kernels.total() <= 260
    assert not forward.syncs | backward.syncs
    with torch.no_grad():
        network.eval()(x)
        with counted() as usage, frozen(network):
            with counted() as inside:
                network(x)
            network(x)
        assert not inside.syncs
        assert usage.syncs.total() == 1, "all operators are compared at once"
        with counted() as usage:
            network(x)
        assert usage.syncs.total() <= 7, "one for each layer that remembers"


def test_an_edit_inside_frozen_is_seen() -> None:
    layer, x = there(CayleyConv2d(4, 4, 3)).eval().requires_grad_(False), torch.randn(1, 4, 6, 6, device=NAME)
    before = layer(x)
    layer.weight.data.mul_(-1)  # before the context, where entries are compared
    with frozen(layer):
        edited = layer(x)
        assert torch.dist(edited, before).item() > 0.1
        layer.weight.neg_()
        torch.testing.assert_close(layer(x).cpu(), before.cpu())
        layer.weight = nn.Parameter(-layer.weight.detach(), requires_grad=False)
        torch.testing.assert_close(layer(x).cpu(), edited.cpu())


def test_work_in_float64_leaves_a_device_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = small_network().eval(), digits(6)
    expected, other = certify(network, [(x, y)]), there(network)
    monkeypatch.setattr(budget, "_WITHOUT_DOUBLE", {NAME})
    monkeypatch.setattr("pretend.REFUSED", {torch.float64, torch.complex128})
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device=NAME).double()
    found = certify(other, [(x.to(NAME), y.to(NAME))])
    torch.testing.assert_close(found.radius, expected.radius, **CLOSE)
    assert lipschitz_bound(other, (1, 8, 8)) == pytest.approx(expected.lipschitz)
    assert not verify(other, x, claimed=2.0).faults
    tall = conv_method("cayley")(2, 8, 3)
    torch.testing.assert_close(
        there(tall)(torch.ones(1, 2, 6, 6, device=NAME)).cpu(), tall(torch.ones(1, 2, 6, 6)), **CLOSE
    )


def test_precision_and_compilation_enter_the_digest_only_when_set(tmp_path: Path) -> None:
    usual, lower = Recipe(epochs=1, batch_size=20), Recipe(epochs=1, batch_size=20, precision="bf16")
    assert not {"precision", "compile"} & set(usual.settings)
    assert lower.settings == {**usual.settings, "precision": "bf16"}
    assert Recipe(compile=True).settings["compile"] is True
    with pytest.raises(ValueError, match="precision must be one of 'float32', 'bf16', got 'half'"):
        Recipe(precision="half")  # type: ignore[arg-type]
    data, seen = digits(), []
    network = nn.Sequential(*small_network()[:-1], nn.Linear(128, 10))
    network[-1].register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    list(fit(network, data, lower, tmp_path / "c"))
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    with pytest.raises(orthoconv.train.CheckpointError, match="precision='bf16', not 'float32'"):
        list(fit(network, data, usual, tmp_path / "c", resume=True))


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_bf16_multiplies_by_float32_operators(tmp_path: Path, device: str) -> None:
    """Linear layers of ours multiply in bfloat16 while they train; their operators, and eval mode, stay float32."""
    usual = nn.Sequential(*small_network(), linear_method("normalized", "cayley")(10, 10)).to(device)
    network, seen = copy.deepcopy(usual), {}
    for k, layer in enumerate(network):
        layer.register_forward_hook(
            lambda layer, args, y, k=k: seen.setdefault((k, layer.training), set()).add(y.dtype)
        )
    (lower,) = fit(network, digits(), Recipe(epochs=1, batch_size=20, precision="bf16"), tmp_path / "lower")
    assert seen[6, True] == seen[7, True] == {torch.bfloat16}
    assert seen[1, True] == seen[3, True] == {torch.float32}, "convolutions stay as they are"
    assert (network[6].singular_values_for((128,)).cpu() - 1).abs().max() < 2e-5
    network.eval()(digits().images.to(device))
    assert seen[6, False] == seen[7, False] == {torch.float32}
    assert not any("reduced" in vars(layer) for layer in network)
    (figures,) = fit(usual, digits(), Recipe(epochs=1, batch_size=20), tmp_path / "usual")
    assert lower["loss"] != figures["loss"]
    assert lower["loss"] == pytest.approx(figures["loss"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_compiled_training_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any) -> None:
    calls, own = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: calls.append(1) or own(model, backend="aot_eager"))
    network = nn.Sequential(nn.Flatten(), linear_method("cayley", "cayley")(64, 10))
    other, recipe = copy.deepcopy(network), Recipe(epochs=1, batch_size=20, augment=False, precision=precision)
    (expected,) = fit(network, digits(), recipe, tmp_path / "eager")
    (figures,) = fit(other, digits(), replace(recipe, compile=True), tmp_path / "compiled")
    assert calls == [1]
    assert figures["loss"] == pytest.approx(expected["loss"], rel=1e-4 if precision == "float32" else 0.02)
    assert set(other.state_dict()) == set(network.state_dict())


def test_certificates_are_of_float32_evaluation() -> None:
    network, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits(6)
    expected = certify(network, [(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(certify(network, [(x, y)]).logits, expected.logits)
