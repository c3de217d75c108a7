"""What eval mode and `frozen` remember: once computed, never stale, gradients intact."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from orthoconv import budget, frozen
from orthoconv.nn import BjorckLinear, CayleyConv2d, CayleyConvTranspose2d, CayleyLinear, LOTConv2d

LAYERS = {
    "conv": lambda: (CayleyConv2d(3, 4, 3), torch.randn(2, 3, 5, 4)),
    "strided": lambda: (CayleyConv2d(1, 4, 4, stride=2, signs="random"), torch.randn(2, 1, 6, 4)),
    "transpose": lambda: (CayleyConvTranspose2d(4, 3, 3), torch.randn(2, 4, 5, 4)),
    "linear": lambda: (CayleyLinear(3, 5, signs="random"), torch.randn(2, 3)),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())


def count(layer: nn.Module) -> list[int]:
    """The list grows by one each time the layer computes its operator, or applies it without forming it."""
    calls: list[int] = []
    compute, check = layer.operator, layer.check

    def counted(*args: Tensor) -> Tensor:
        calls.extend([1] * layer.remembers)
        return compute(*args)

    def checked() -> None:
        calls.append(1)  # what comes before each computation in training
        check()

    layer.operator, layer.check = counted, checked
    return calls


def fresh(layer: nn.Module, x: Tensor) -> Tensor:
    """What a new layer with the same parameters returns in training mode."""
    other = copy.deepcopy(layer)
    other.__dict__.pop("operator", None)
    other.__dict__.pop("check", None)
    return other.train()(x)


def step(layer: nn.Module) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


EDITS = {
    "optimizer step": step,
    "load_state_dict": lambda layer: layer.load_state_dict({k: -v for k, v in layer.state_dict().items()}),
    "in place under no_grad": lambda layer: [torch.no_grad()(p.mul_)(1.5) for p in layer.parameters()],
    ".data in place": lambda layer: layer.weight.data.mul_(-1),
    ".data of g": lambda layer: layer.g.data.mul_(3),
    ".data assigned": lambda layer: setattr(layer.weight, "data", layer.weight.data.flip(0)),
    "one entry of .data": lambda layer: layer.weight.data.view(-1)[-1].add_(0.5),
    "parameter replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() + 0.5)),
    "through numpy": lambda layer: layer.weight.detach().numpy().__imul__(-2),
    "train and eval": lambda layer: (layer.train(), step(layer), layer.eval()),
}


@every_layer
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("mode", ["eval", "frozen", "frozen eval"])
def test_never_stale(make, edit, mode: str) -> None:
    layer, x = make()
    layer.train("eval" not in mode)

    def check() -> None:
        before = layer(x)
        edit(layer)
        after = layer(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, fresh(layer, x))

    if "frozen" in mode:
        with frozen(layer):
            check()
    else:
        check()


@every_layer
def test_computed_once_in_eval_and_each_time_in_training(make) -> None:
    layer, x = make()
    calls = count(layer)
    layer(x), layer(x)
    assert len(calls) == 2
    layer.eval()
    for _ in range(3):
        layer(x)
    with torch.no_grad():
        layer(x)
    with torch.inference_mode():
        layer(x)
    assert len(calls) == 3
    layer.train()
    with frozen(layer), frozen(layer):
        layer(x), layer(x)
    assert len(calls) == 4
    layer(x)
    assert len(calls) == 5


@every_layer
def test_attacks_do_not_compute_the_operator_again(make) -> None:
    """The gradient of the input alone, as an attack takes it, with parameters that do require gradients."""
    layer, x = make()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    layer.eval()(x)
    calls = count(layer)
    for _ in range(3):
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(grad, expected)
    assert not calls


@every_layer
def test_gradients_of_the_parameters_do_not_depend_on_the_mode(make) -> None:
    layer, x = (t.double() for t in make())

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(layer(x).pow(3).sum(), layer.parameters()))

    expected = gradients()
    torch.testing.assert_close(gradients(), expected)
    layer.eval()
    torch.testing.assert_close(gradients(), expected)
    torch.testing.assert_close(gradients(), expected)
    with torch.inference_mode():
        layer(x)
    torch.testing.assert_close(gradients(), expected)


@every_layer
def test_frozen_parameters_get_no_gradient(make) -> None:
    layer, x = make()
    layer.eval().weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.g.grad is not None


@every_layer
def test_to_another_dtype(make) -> None:
    layer, x = make()
    layer.eval()(x)
    y = layer.double()(x.double())
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, fresh(layer, x.double()))


@every_layer
def test_copies_are_independent_and_not_frozen(make) -> None:
    layer, x = make()
    layer.eval()(x)
    with frozen(layer):
        twin = copy.deepcopy(layer)
    twin.train().weight.data.mul_(-1)
    torch.testing.assert_close(layer(x), fresh(layer, x))
    torch.testing.assert_close(twin(x), fresh(twin, x))
    calls = count(twin)
    twin(x), twin(x)
    assert len(calls) == 2


def test_memory_is_bounded() -> None:
    layer = CayleyConv2d(2, 2, 3).eval()
    for n in range(1, 12):
        layer(torch.randn(1, 2, n, n))
    assert len(layer._memory.operators) == 4
    layer.train()
    assert not layer._memory.operators
    assert not layer._memory.snapshot


def test_memory_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LOTConv2d(3, 3, 3).eval()
    one = 9 * 5 * 9 * 8  # frequencies, entries of a matrix, bytes of a complex number
    monkeypatch.setattr(budget, "REMEMBERED_BYTES", 3 * one)
    for h in range(9, 6, -1):
        layer(torch.randn(1, 3, h, 9))
    assert list(layer._memory.operators) == [(9, 9), (8, 9), (7, 9)]
    monkeypatch.setattr(budget, "REMEMBERED_BYTES", one)
    layer(torch.randn(1, 3, 10, 9))
    assert list(layer._memory.operators) == [(10, 9)]  # the newest stays, though it has more bytes


def test_what_would_exceed_the_budget_is_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = CayleyConv2d(3, 3, 3).double().eval(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    expected = layer(x)
    layer = copy.deepcopy(layer)
    monkeypatch.setattr(budget, "REMEMBERED_BYTES", 9 * 5 * 9 * 16 - 1)
    torch.testing.assert_close(layer(x), expected)
    assert not layer._memory.operators
    monkeypatch.setattr(budget, "REMEMBERED_BYTES", 9 * 5 * 9 * 16)
    torch.testing.assert_close(layer(x), expected)
    assert list(layer._memory.operators) == [(9, 9)]


def test_frozen_ends_with_an_exception() -> None:
    layer, x = LAYERS["conv"]()
    with pytest.raises(ZeroDivisionError), frozen(layer):
        raise ZeroDivisionError
    calls = count(layer)
    layer(x), layer(x)
    assert len(calls) == 2


def test_frozen_reaches_the_layers_of_a_model() -> None:
    model = nn.Sequential(nn.Sequential(CayleyConv2d(1, 2, 3)), nn.Flatten(), CayleyLinear(8, 2))
    calls = [count(model[0][0]), count(model[2])]
    with frozen(model) as same:
        assert same is model
        for _ in range(3):
            model(torch.randn(1, 1, 2, 2))
    assert [len(c) for c in calls] == [1, 1]


def test_settings_are_compared_too() -> None:
    x = torch.randn(2, 20)
    layer = BjorckLinear(20, 20)
    layer.weight.data.normal_()
    layer.eval()
    layer.iterations = 1
    before = layer(x)
    layer.iterations = 20
    assert not torch.equal(layer(x), before)
    torch.testing.assert_close(layer(x), fresh(layer, x))


def test_what_is_handed_out_is_not_what_is_remembered() -> None:
    layer, x = LAYERS["conv"]()
    layer.eval().requires_grad_(False)
    before = layer(x)
    layer.spectrum((5, 4)).mul_(3)
    assert torch.equal(layer(x), before)


@every_layer
def test_an_edit_of_what_is_handed_out_is_seen(make) -> None:
    layer, x = make()
    size = (1, 1) if x.ndim == 2 else layer.geometry.inner_size(x.shape[-2:])
    layer.eval()
    for gradients in (False, True):
        layer.requires_grad_(gradients)
        before = layer(x)
        for edit in (lambda Q: Q.mul_(3), lambda Q: Q[0].zero_(), lambda Q: Q.detach().add_(1)):
            with torch.no_grad():
                edit(layer.cached_operator(size))
            assert torch.equal(layer(x), before)
            Q = layer.cached_operator(size)  # which has a gradient, if the weights do
            with torch.no_grad():
                edit(Q)
            assert torch.equal(layer(x), before)


def test_threads_share_a_layer_with_more_sizes_than_are_kept() -> None:
    """Each of them drops operators that another one is about to use."""
    layer = CayleyConv2d(2, 2, 3, dtype=torch.float64).eval().requires_grad_(False)
    inputs = [torch.randn(1, 2, n, 3, dtype=torch.float64) for n in range(2, 10)]
    expected = [layer(x) for x in inputs]

    def run(start: int) -> float:
        order = [(start + k) % len(inputs) for k in range(100)]
        return max(torch.dist(layer(inputs[k]), expected[k]).item() for k in order)  # BLAS may use other threads there

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(run, range(8))) < 1e-12
    finally:
        sys.setswitchinterval(interval)
