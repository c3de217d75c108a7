"""Modules with a forward of their own: bounded as what they compute in eval mode, or refused."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from orthoconv import certify, convert, export, in_double, lipschitz_bound, predict, verify
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin, UnitCat
from orthoconv.testing import dense_matrix

SHAPE = (4, 6, 6)


class Own(nn.Module):
    """Whatever a function makes of the module and its input."""

    def __init__(self, f: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.f = nn.ModuleList(parts), f
        self.weight = nn.Parameter(torch.linspace(-2, 1, 4)[:, None, None])
        self.register_buffer("mean", torch.full((4, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def shuffled(self: Own, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def split(self: Own, x: Tensor) -> Tensor:
    one, two = x.chunk(2, 1)
    return torch.cat((one, self.parts[0](two)), 1)


def in_place(self: Own, x: Tensor) -> Tensor:
    y = 2 * x
    z = y
    y += x
    return z  # which is 3 x


LINEAR: dict[str, tuple[Own, float]] = {
    "weights": (Own(lambda self, x: x * self.weight), 1.0),
    "mean": (Own(lambda self, x: x.mean((2, 3))), 1.0),
    "keepdim": (Own(lambda self, x: torch.mean(x, dim=-1, keepdim=True)), 1.0),
    "slices": (Own(lambda self, x: x[:, 1:3, ::2, None, -1]), 1.0),
    "shuffle": (Own(shuffled), 1.0),
    "split": (Own(split, nn.Conv2d(2, 3, 1, bias=False)), 1.0),
    "pad": (Own(lambda self, x: F.pad(x, (1, 2, 0, 3), mode="reflect")), 1.0),
    "interpolate": (Own(lambda self, x: F.interpolate(x, scale_factor=2)), 1.0),
    "bilinear": (Own(lambda self, x: F.interpolate(x, size=(9, 11), mode="bilinear")), 1.0),
    "quotient": (Own(lambda self, x: -x / 4), 1.0),
    "repeated": (Own(lambda self, x: x[:, :1].expand(-1, 3, -1, -1)), 1.0),
    "whole image": (Own(lambda self, x: F.avg_pool2d(x, 6, stride=1)), 1.0),
    "in place": (Own(in_place), 1.0),
    "functional": (Own(lambda self, x: F.conv2d(x, self.parts[0].weight, padding=1), nn.Conv2d(4, 3, 3)), 1.6),
}


@pytest.mark.parametrize("name", LINEAR)
def test_bounds_are_those_of_the_dense_matrix(name: str) -> None:
    model, room = LINEAR[name]
    model = model.double().eval()
    norm = torch.linalg.matrix_norm(dense_matrix(model, SHAPE, dtype=torch.float64), ord=2).item()
    bound = lipschitz_bound(model, SHAPE)
    assert norm <= bound * (1 + 1e-12)
    assert bound <= room * norm * (1 + 1e-6)


CONSTANTS = {
    "minus": lambda self, x: x - self.mean,
    "tensor": lambda self, x: x - torch.tensor(0.5),
    "number": lambda self, x: 0.25 - x,
    "maximum": lambda self, x: torch.maximum(x[:, :2], x[:, 2:]),
    "clamp": lambda self, x: x.clamp(0, 1).relu_(),
    "shape": lambda self, x: x if x.shape[1] == 4 and isinstance(x, Tensor) else 5 * x,
    "eval": lambda self, x: 5 * x if self.training else F.dropout(x, 0.5, self.training),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_is_added_or_cut_has_the_bound_1(name: str) -> None:
    model = Own(CONSTANTS[name]).eval()
    before = set(vars(model)), list(model.state_dict())
    assert lipschitz_bound(model, SHAPE) == pytest.approx(1, rel=0.42 if name == "maximum" else 1e-9)
    assert (set(vars(model)), list(model.state_dict())) == before, "the model is left as it was"


class Network(nn.Module):
    """As people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = CayleyConv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([CayleyConv2d(8, 8, 3), CayleyConv2d(8, 8, 3)])
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        for block in self.blocks:
            identity = x
            x = scale * block(x)
            x += scale * identity
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_a_network_of_ones_own() -> None:
    model, x = Network().eval(), torch.rand(6, 4, 6, 6)
    y = model(x).argmax(1)
    bound = lipschitz_bound(model, (4, 6, 6))
    found = certify(model, [(x, y)])
    assert found.lipschitz == pytest.approx(bound, rel=1e-9)
    assert found.head == "pairwise"
    assert found.slack.max() < 1e-4
    assert (found.radius > 0).all()
    assert verify(model, x).faults == []
    torch.testing.assert_close(export(model, (4, 6, 6))(x), model(x), rtol=0, atol=1e-5)
    with pytest.raises(TypeError, match="BatchNorm2d is bounded in eval mode only"):
        lipschitz_bound(model.train(), (4, 6, 6))


def wrappers() -> dict[str, Callable[[nn.Module], nn.Module]]:
    return {
        "average": AveragedModel,
        "parallel": nn.DataParallel,
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "both": lambda model: nn.DataParallel(AveragedModel(model)),
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("average", "parallel") else []) for name in wrappers()],
)  # "both" is one inside the other
def test_wrappers_are_looked_through(name: str) -> None:
    model, x = Network().eval(), torch.rand(4, 4, 6, 6)
    wrapped = wrappers()[name](model).eval()
    assert lipschitz_bound(wrapped, (4, 6, 6)) == pytest.approx(lipschitz_bound(model, (4, 6, 6)), rel=1e-12)
    assert unwrapped(wrapped)(x).shape == (4, 3)
    if name != "compiled":  # whose forward pass takes long the first time
        _check_certificates(model, wrapped, x)
    wrapped.register_forward_hook(lambda module, inputs, output: 5 * output)
    with pytest.raises(TypeError, match="forward hooks"):
        lipschitz_bound(wrapped, (4, 6, 6))


def test_models_compiled_in_place_are_those_before() -> None:
    """``model.compile()``, of the whole and of a part with its own forward; anything else in its place is refused."""

    class Light(nn.Module):  # layers of torch, which compile in a moment
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular"), nn.Linear(144, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.flatten(torch.relu(self.conv(x)), 1))

    model, x = Light().eval(), torch.rand(4, 4, 6, 6)
    bound, y = lipschitz_bound(model, (4, 6, 6)), model(x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * self.inner(x)

    around = Around().eval()
    model.compile(backend="eager")
    assert lipschitz_bound(model, (4, 6, 6)) == pytest.approx(bound, rel=1e-12)
    assert lipschitz_bound(around, (4, 6, 6)) == pytest.approx(bound / 2, rel=1e-12)
    torch.testing.assert_close(export(model, (4, 6, 6))(x), y, rtol=0, atol=1e-5)
    assert lipschitz_bound(convert(model, (4, 6, 6)).eval(), (4, 6, 6)) < 1 + 1e-5
    assert model._compiled_call_impl is not None, "the caller's model stays compiled"
    model._compiled_call_impl = lambda x: 5 * x
    with pytest.raises(TypeError, match="no rule for the own _compiled_call_impl"):
        lipschitz_bound(model, (4, 6, 6))


def test_distributed_models_are_looked_through(tmp_path) -> None:
    distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model, x = Network().eval(), torch.rand(4, 4, 6, 6)
        wrapped = DistributedDataParallel(model).eval()
        assert lipschitz_bound(wrapped, (4, 6, 6)) == pytest.approx(lipschitz_bound(model, (4, 6, 6)), rel=1e-12)
        _check_certificates(model, wrapped, x)
        assert torch.equal(predict(wrapped, x).index, model(x).argmax(1))
        assert lipschitz_bound(convert(wrapped, (4, 6, 6)).eval(), (4, 6, 6)) < 1 + 1e-5
    finally:
        distributed.destroy_process_group()


def _check_certificates(model: nn.Module, wrapped: nn.Module, x: Tensor) -> None:
    labels = model(x).argmax(1)
    torch.testing.assert_close(certify(wrapped, [(x, labels)]).radius, certify(model, [(x, labels)]).radius)
    assert verify(wrapped, x).faults == []
    torch.testing.assert_close(export(wrapped, (4, 6, 6))(x), model(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(in_double(wrapped)(x.double()).float(), model(x), rtol=0, atol=1e-5)


def test_the_forward_of_accelerate_is_looked_through_and_no_other() -> None:
    model = Network().eval()
    bound = lipschitz_bound(model, (4, 6, 6))
    model._original_forward = model.forward

    def make(home: str) -> Any:
        forward = eval("lambda self, *args: wrapped(self, *args)", {"wrapped": Network.forward, "__name__": home})
        forward.__wrapped__ = Network.forward
        return MethodType(forward, model)

    model.forward = make("accelerate.utils.operations")
    assert unwrapped(model) is not model
    assert lipschitz_bound(model, (4, 6, 6)) == bound
    assert "forward" in vars(model)
    model.forward = make("elsewhere")
    with pytest.raises(TypeError, match="the own forward of Network"):
        lipschitz_bound(model, (4, 6, 6))


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * x


class Called(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return 5 * super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return x


def stale_view(self: Own, x: Tensor) -> Tensor:
    y = 2 * x
    view = y[:, :1]
    y += x
    return view


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "branch": (Own(lambda self, x: x if x.sum() > 0 else 5 * x), "control flow"),
    "item": (Own(lambda self, x: x * x.max().item()), "numbers are taken out of a tensor|no rule"),
    "float": (Own(lambda self, x: x * float(x.max())), "cannot be traced"),
    "square": (Own(lambda self, x: x * x), "no rule for call_function mul"),
    "matmul": (Own(lambda self, x: x @ x.transpose(2, 3)), "no rule for"),
    "view": (Own(stale_view), "shares its memory"),
    "training": (Own(lambda self, x: 5 * x if self.training else x).train(), "something else in training"),
    "count": (Counting().eval(), "changes from call to call"),
    "call": (nn.Sequential(Called()).eval(), "no rule for __call__ of Called"),
    "tuple": (Own(lambda self, x: (x, x)), "must return one tensor"),
    "batch": (Own(lambda self, x: x - x.mean(0, keepdim=True)), "no rule for"),
    "mixed": (Own(lambda self, x: x.flip(0)), "mixes"),
    "repeated": (Own(lambda self, x: x[:, [0, 0]]), "no rule for"),
    "random": (Own(lambda self, x: x * torch.rand(())), "changes from call to call"),
    "dropout": (Own(lambda self, x: F.dropout(x, 0.5)), "no rule for"),
    "made": (Own(lambda self, x: nn.ReLU()(x)), "made in __init__"),
    "fill": (Own(lambda self, x: x.clone().zero_() + x), "in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_stands_for_is_refused(name: str) -> None:
    model, message = REFUSED[name]
    model = model if name == "training" else model.eval()
    with pytest.raises(TypeError, match=message):
        lipschitz_bound(model, SHAPE)


def test_hooks_and_replaced_methods_inside_are_refused() -> None:
    for spoil in (
        lambda part: part.register_forward_hook(lambda module, inputs, output: 5 * output),
        lambda part: setattr(part, "forward", lambda x: 5 * x),
    ):
        for path in ("", "parts.0"):
            model = Own(lambda self, x: self.parts[0](x), Own(lambda self, x: x)).eval()
            assert lipschitz_bound(model, SHAPE) == 1
            spoil(model.get_submodule(path))
            with pytest.raises(TypeError, match=r"forward hooks of Own|own forward of Own"):
                lipschitz_bound(model, SHAPE)


def test_pieces_that_overlap_are_not_separate() -> None:
    model = Own(lambda self, x: torch.cat((x[:, :3], x[:, 1:]), 1)).double().eval()
    norm = torch.linalg.matrix_norm(dense_matrix(model, SHAPE, dtype=torch.float64), ord=2).item()
    assert norm == pytest.approx(2**0.5)
    assert lipschitz_bound(model, SHAPE) >= norm * (1 - 1e-12)


def test_weights_of_a_concatenation() -> None:
    cat = UnitCat(3)
    with torch.no_grad():
        cat.alpha.copy_(torch.tensor([0.0, 1.0, -2.0]))
    model = Own(lambda self, x: self.parts[0](x, -x, x), cat).double().eval()
    norm = torch.linalg.matrix_norm(dense_matrix(model, SHAPE, dtype=torch.float64), ord=2).item()
    assert norm == pytest.approx(1)
    assert norm <= lipschitz_bound(model, SHAPE) * (1 + 1e-12) <= 1 + 1e-9


def test_a_copy_of_a_model_has_its_bound() -> None:
    model = Own(lambda self, x: self.parts[1](self.parts[0](x)), CayleyConv2d(4, 4, 3), MaxMin()).eval()
    assert lipschitz_bound(copy.deepcopy(model), SHAPE) == lipschitz_bound(model, SHAPE)
    assert lipschitz_bound(nn.Sequential(model, nn.Flatten(), CayleyLinear(144, 3)), SHAPE) == pytest.approx(
        1, abs=1e-5
    )
