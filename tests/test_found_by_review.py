"""Bounds that a review of November 2026 found too small. Each is now right, or refused."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from orthoconv import certify, lipschitz_bound, to_onnx, verify
from orthoconv.nn import ConcatResidual, ConvexResidual, Ensemble
from orthoconv.nn.layer import Combination, Layer


class Own(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, f) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x *= 3
        return x


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.leaky_relu(x, x.shape[0]),
        lambda x: F.elu(x, alpha=x.size(0)),
        lambda x: x.repeat(1, x.shape[0])[:, :8],
        lambda x: F.leaky_relu(x, 2 * x.shape[0] + 1),
    ],
    ids=["slope", "alpha", "repeat", "arithmetic"],
)
def test_numbers_that_come_from_the_size_of_the_batch_are_refused(f) -> None:
    with pytest.raises(TypeError, match=r"batches of any size|there is no rule|not \d"):
        lipschitz_bound(Own(f), (4,))


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (lambda x: x.view(x.shape[0], -1), (2, 3)),
        (lambda x: F.avg_pool2d(x, (x.shape[2], x.shape[3])).flatten(1), (2, 4, 4)),
        (lambda x: x.reshape(x.shape[0], 2, -1).flatten(1), (4,)),
    ],
    ids=["view", "pool", "reshape"],
)
def test_other_sizes_are_not(f, shape: tuple[int, ...]) -> None:
    assert lipschitz_bound(Own(f), shape) <= 1 + 1e-6


@pytest.mark.parametrize(("f", "shape"), [(lambda x: F.linear(x, x), (4,)), (lambda x: F.conv2d(x, x), (1, 3, 3))])
def test_a_function_of_the_input_twice_is_refused(f, shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeError):
        lipschitz_bound(Own(f), shape)


@pytest.mark.parametrize("model", [ConvexResidual(Tripled()), ConvexResidual(nn.Identity(), Tripled())])
def test_a_branch_that_changes_its_input_is_refused(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="works in place"):
        lipschitz_bound(model, (4,))
    with pytest.raises(TypeError, match="works in place"):
        certify(nn.Sequential(nn.Linear(4, 4), model, nn.Linear(4, 3)), [(torch.rand(2, 4), torch.tensor([0, 1]))])


def test_half_of_the_channels_may_not_be_changed_in_place() -> None:
    with pytest.raises(TypeError, match="works in place"):
        lipschitz_bound(ConcatResidual(Tripled()), (4,))


@pytest.mark.parametrize(
    ("layer", "weight", "shape"),
    [
        (nn.Conv1d(1, 1, 3, padding=4, bias=False), [[[1.0, 0, 0, -1, 0]]], (1, 1)),
        (nn.Conv2d(1, 1, 3, padding=4, bias=False), [[[[1.0, 0, 0, -1, 0]]]], (1, 1, 1)),
        (nn.ConvTranspose2d(1, 1, (1, 3), bias=False), [[[[1.0, 0, 0, -1, 0]]]], (1, 1, 1)),
    ],
    ids=["sequence", "image", "transposed"],
)
def test_a_kernel_counts_with_the_taps_that_it_has(layer: nn.Module, weight, shape: tuple[int, ...]) -> None:
    layer.weight = nn.Parameter(torch.tensor(weight))
    x = torch.ones(1, *shape)
    grown = float(layer(x).detach().norm() / x.norm())
    assert lipschitz_bound(layer, shape) >= grown - 1e-6
    assert grown == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("f", [lambda x: torch.softmax(x, 1, torch.float16), lambda x: x.softmax(1, torch.float16)])
def test_softmax_in_another_precision_is_refused(f) -> None:
    with pytest.raises(TypeError):
        lipschitz_bound(Own(f), (4,))
    assert lipschitz_bound(Own(lambda x: torch.softmax(x, 1)), (4,)) <= 1 + 1e-6


def test_overlapping_pieces_that_are_joined_as_one_tuple_are_refused() -> None:
    try:
        graph = fx.symbolic_trace(Own(lambda x: torch.cat(torch.tensor_split(x, (3, 1), 1), 1)))
    except TypeError as error:
        pytest.skip(f"this torch traces no torch.cat of a tuple: {error}")
    with pytest.raises(TypeError, match="there is no rule"):
        lipschitz_bound(graph, (4,))
    halves = fx.symbolic_trace(Own(lambda x: torch.cat(torch.chunk(x, 2, 1), 1)))
    assert lipschitz_bound(halves, (4,)) <= 1 + 1e-6


def test_a_wrapper_with_a_forward_of_its_own_is_refused() -> None:
    wrapper = nn.DataParallel(nn.Identity())
    wrapper.forward = lambda x: 5 * x
    with pytest.raises(TypeError, match="own forward"):
        lipschitz_bound(wrapper, (4,))


def test_an_assignment_to_a_traced_tensor_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        x.data = x + 5e-5 * torch.sin(40000 * x)
        return x

    with pytest.raises(TypeError, match="attribute 'data'"):
        lipschitz_bound(Own(f), (4,))


@pytest.mark.slow
def test_a_certificate_is_not_written_where_the_runtime_loses_digits(tmp_path) -> None:
    """onnxruntime has the log of a sigmoid, which loses its digits for negative numbers, for the log-sigmoid."""
    plain = nn.Linear(2, 2, bias=False)
    plain.weight.data = torch.eye(2)
    model, x = nn.Sequential(plain, nn.LogSigmoid()).eval(), torch.tensor([[0.3, 0.2], [0.5, 1.0]])
    with pytest.raises(ValueError, match="differ by"):
        to_onnx(model, x, tmp_path / "model.onnx", certificate=True)
    assert to_onnx(model, x, tmp_path / "model.onnx", certificate=None) is False


def test_a_module_may_be_named_like_a_split() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chunk = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.chunk(x)
            return torch.cat((y[:, :2], y[:, 2:]), 1)

    model = Named()
    assert lipschitz_bound(model, (4,)) >= float(torch.linalg.matrix_norm(model.chunk.weight.detach(), 2)) - 1e-6


# A second review, of the same month


class Stateful(nn.Module):
    """A module whose forward is a function of itself and of the input."""

    def __init__(self, f, **parts) -> None:
        super().__init__()
        self.f = f
        for name, value in parts.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def _counts_in_a_buffer(self, x: Tensor) -> Tensor:
    self.count += 1
    return x * self.count


def _grows_a_weight(self, x: Tensor) -> Tensor:
    self.layer.weight.data.mul_(1.01)
    return self.layer(x)


def _counts_calls(self, x: Tensor) -> Tensor:
    self.calls += 1
    return 5 * x if self.calls > 30 else x


def _keeps_a_list(self, x: Tensor) -> Tensor:
    self.seen.append(1)
    return 5 * x if len(self.seen) > 30 else x


def _keeps_features(self, x: Tensor) -> Tensor:
    self.features = self.layer(x)
    return torch.relu(self.features)


STATEFUL = {
    "count": lambda: Stateful(_counts_in_a_buffer, count=torch.ones(1)),
    "weight": lambda: Stateful(_grows_a_weight, layer=nn.Linear(4, 4)),
    "calls": lambda: Stateful(_counts_calls, calls=0),
    "seen": lambda: Stateful(_keeps_a_list, seen=[]),
    "features": lambda: Stateful(_keeps_features, layer=nn.Linear(4, 4), features=None),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_forward_that_changes_its_module_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"changes from call to call: its forward writes to .*{name}"):
        lipschitz_bound(STATEFUL[name]().eval(), (4,))


def test_a_refused_module_is_left_as_it_was() -> None:
    model = STATEFUL["features"]().eval()
    with pytest.raises(TypeError, match="features"):
        lipschitz_bound(model, (4,))
    assert type(model.features) is Tensor


def test_what_stays_the_same_after_the_first_call_is_bounded() -> None:
    def f(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(-0.1, 0.1)
        self.table = torch.arange(4.0) if self.table is None else self.table
        return self.layer(x) + self.table

    model = Stateful(f, layer=nn.Linear(4, 4), table=None).eval()
    bound = lipschitz_bound(model, (4,))
    assert bound >= float(torch.linalg.matrix_norm(model.layer.weight.detach().clamp(-0.1, 0.1), 2)) - 1e-6


@pytest.mark.parametrize(
    "f",
    [
        lambda x: 5 * x if torch.is_grad_enabled() else x,
        lambda x: 5 * x if torch.is_inference_mode_enabled() else x,
        lambda x: x if torch.is_inference_mode_enabled() else 5 * x,
    ],
    ids=["gradients", "inference", "no inference"],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_forward_that_depends_on_gradients_is_refused(f, training: bool) -> None:
    with pytest.raises(TypeError, match="with gradients or in inference mode"):
        lipschitz_bound(Own(f).train(training), (4,))


class WithGradients(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 5 * weight if torch.is_grad_enabled() else weight


def test_a_parametrization_that_depends_on_gradients_is_refused() -> None:
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", WithGradients()).eval()
    with pytest.raises(TypeError, match=r"ParametrizedLinear\.weight .* same tensor at each call"):
        lipschitz_bound(layer, (4,))
    steady = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).eval()
    assert lipschitz_bound(steady, (4,)) == pytest.approx(1, abs=1e-5)


def _with_forward(forward) -> fx.GraphModule:
    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    type(graph).forward = forward
    return graph


def _with_other_code() -> fx.GraphModule:
    graph = fx.symbolic_trace(Own(lambda x: x + 0))
    graph.graph.on_generate_code(lambda _: lambda body: [line.replace("return add", "return 5 * add") for line in body])
    graph.recompile()
    assert torch.equal(graph(torch.ones(1)), torch.full((1,), 5.0))
    return graph


@pytest.mark.parametrize(
    "make",
    [lambda: _with_forward(lambda self, x: 50 * x), lambda: _with_forward(nn.Hardtanh(-9, 9)), _with_other_code],
    ids=["function", "object", "code"],
)
def test_a_graph_that_runs_other_code_is_refused(make) -> None:
    with pytest.raises(TypeError, match="a graph is bounded"):
        lipschitz_bound(make(), (4,))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.leaky_relu(x, x.shape[0] // 4),
        lambda x: F.elu(x, alpha=1 + x.size(0) // 5),
        lambda x: x.repeat(1, 1 + x.shape[0] // 4),
    ],
    ids=["slope", "alpha", "repeat"],
)
def test_numbers_that_come_from_larger_batches_are_refused(f) -> None:
    with pytest.raises(TypeError, match="computes with their size"):
        lipschitz_bound(Own(f), (4,))
    with pytest.raises(TypeError, match="computes with their size"):
        lipschitz_bound(fx.symbolic_trace(Own(f)), (4,))


class TripledInside(Layer):
    """A layer that is honest about its value, but changes its input where torch does not count it as an edit."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(3)
        return x / 3

    def lipschitz(self, shape) -> float:
        return 1.0

    def rounding_units(self, shape) -> float:
        return 2.0


class Mean(Combination):
    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        return (self.g(y) + y) / 2

    def growth(self, x: Tensor, child):
        f = child("f", self.f, x)
        return 0.5 * (f * child("g", self.g, self.f(x)) + f)


@pytest.mark.parametrize(
    "model",
    [
        ConvexResidual(TripledInside()),
        ConvexResidual(nn.Sequential(TripledInside())),
        Mean(nn.Identity(), Tripled()),
        Mean(nn.Linear(4, 4), Tripled()),
        Mean(nn.Identity(), TripledInside()),
        Stateful(lambda self, x: (self.g(x) + x) / 2, g=TripledInside()),
    ],
    ids=["data", "nested", "combination", "after a layer", "data in a combination", "own forward"],
)
def test_a_part_that_changes_its_input_is_refused_everywhere(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="changes its input"):
        lipschitz_bound(model, (4,))


def test_a_combination_that_copies_its_input_may_have_such_parts() -> None:
    assert lipschitz_bound(Ensemble([TripledInside(), nn.Identity()]), (4,)) == pytest.approx(1, abs=1e-6)
    assert lipschitz_bound(Mean(nn.Identity(), nn.ReLU()), (4,)) == pytest.approx(1, abs=1e-6)


class Rounding(nn.Module):
    """x + 1e6 - 1e6, which float32 rounds to multiples of 1/16; with a cast that seems to do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.tensor(1e6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.large).float() - self.large


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float() * 3.1 - 1e6


def test_a_cast_does_not_hide_rounding(tmp_path) -> None:
    x, y = torch.tensor([[0.04, 0.02]]), torch.tensor([0])
    model = nn.Sequential(Rounding(), nn.Identity()).eval()
    with pytest.raises(TypeError, match=r"0 \(Rounding\) computes float in torch.float32"):
        certify(model, [(x, y)])  # said 0.044
    with pytest.raises(TypeError, match=r"0 \(Cast\) computes .* in torch.float32"):
        certify(nn.Sequential(Cast(), nn.Identity()).eval(), [(x, y)])
    with pytest.raises(TypeError, match="Rounding"):
        verify(model, x)
    with pytest.raises(ValueError, match="Rounding"):
        to_onnx(model, torch.rand(2, 2), tmp_path / "model.onnx", certificate=True)
    assert float(certify(model, [(x, y)], rounding=False).radius) == pytest.approx(0.0442, abs=1e-3)
    assert float(certify(model[0], [(x, y)]).radius) <= 0.02 / math.sqrt(2)  # by its graph, without the cast


def test_a_cast_of_the_input_is_harmless() -> None:
    model = nn.Sequential(Stateful(lambda self, x: (x.float() - self.mean) / 0.5, mean=torch.tensor([0.4, 0.5])))
    certificates = certify(model.eval(), [(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))])
    assert float(certificates.radius) > 0.1


def test_threads_may_ask_for_bounds_at_once() -> None:
    call = nn.Module.__call__
    models = [Own(nn.Sequential(*(Own(torch.relu) for _ in range(5)))).eval() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        bounds = list(pool.map(lambda model: lipschitz_bound(model, (4,)), models * 3))
    assert bounds == [1.0] * 12
    assert nn.Module.__call__ is call


def test_a_complex_factor_is_refused() -> None:
    model = Stateful(lambda self, x: (x * self.factor).abs(), factor=torch.tensor(0.1 + 3j))
    with pytest.raises(TypeError, match="there is no rule for call_function mul"):
        lipschitz_bound(model.eval(), (4,))


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 5 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 5 * gradient


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SCRIPTED = torch.jit.trace(lambda x: 5 * x, torch.rand(2, 4))


@pytest.mark.parametrize(
    "f",
    [Fivefold.apply, lambda x: Fivefold.apply(x), SCRIPTED, lambda x: torch.tensor(x)],
    ids=["bound function", "function", "script", "tensor"],
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_what_would_crash_is_refused(f) -> None:
    """The process died: C++ code took what stands for a tensor in a trace for a tensor."""
    with pytest.raises(TypeError, match="has no rule"):
        lipschitz_bound(Own(f).eval(), (4,))
    assert torch.equal(Own(f)(torch.ones(2, 4)), f(torch.ones(2, 4)))


@pytest.mark.parametrize(
    "is_large",
    [
        lambda x: float(x.norm()) > 1e3,
        lambda x: bool((x > 1e3).any()),
        lambda x: len(torch.nonzero(x > 1e3)) > 0,
        lambda x: np.linalg.norm(x.numpy()) > 1e3,
        lambda x: max(float(v) for v in x.flatten()) > 1e3,
    ],
    ids=["float", "bool", "len", "numpy", "iteration"],
)
def test_an_error_that_forward_swallows_is_not_forgotten(is_large) -> None:
    def f(x: Tensor) -> Tensor:
        try:
            return 5 * x if is_large(x) else x
        except Exception:
            return x

    with pytest.raises(TypeError, match="also where forward goes on after the error"):
        lipschitz_bound(Own(f).eval(), (4,))
