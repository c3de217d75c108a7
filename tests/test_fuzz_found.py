"""What the fuzzer found, as small as it can be; each failed before it was mended."""

import copy
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from orthoconv import certify, export, in_double, lipschitz_bound, rounding_bound, to_onnx, verify
from orthoconv.attacks import L2Ball, cross_examine, empirical_lipschitz, pgd
from orthoconv.nn import CayleyConv2d, CayleyLinear, ConcatResidual, Scale
from orthoconv.testing import dense_matrix


def identity_graph() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return fx.GraphModule(nn.Module(), graph)


def test_a_subclass_that_type_made_is_not_of_abc() -> None:
    """`type` gives a class made of one of ours the module "abc", which was trusted whatever it computes."""
    forward = partialmethod(lambda self, factor, x: factor * CayleyLinear.forward(self, x), 5.0)
    made = type("Made", (CayleyLinear,), {"forward": forward})
    assert made.__module__ == "abc"
    with pytest.raises(TypeError, match=r"no rule for abc\.Made"):
        lipschitz_bound(made(4, 4), (4,))
    assert lipschitz_bound(type("Made", (CayleyLinear,), {"note": "mine"})(4, 4), (4,)) == pytest.approx(1, abs=1e-5)


class Triple(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), CayleyLinear(4, 4)])
def test_parametrized_layers_are_known_by_what_torch_gave_them(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Triple())
    norm = torch.linalg.matrix_norm(dense_matrix(layer, (4,)), ord=2).item()
    assert lipschitz_bound(layer, (4,)) == pytest.approx(norm, rel=1e-5)
    type(layer).forward = lambda self, x: 5 * x
    with pytest.raises(TypeError, match="no rule for"):
        lipschitz_bound(layer, (4,))


def test_a_parametrized_layer_is_known_after_a_copy() -> None:
    """torch writes `__slotnames__` into the class of a parametrized layer when it copies one."""
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Triple())
    twin = copy.deepcopy(layer)
    assert "__slotnames__" in vars(type(twin))
    assert lipschitz_bound(twin, (4,)) == lipschitz_bound(layer, (4,))


def test_a_constant_model_is_certified() -> None:
    """The bound 0 was an error of `certified_radius` that named nothing."""
    model = nn.Sequential(Scale(0.0), nn.Linear(4, 3)).eval()
    x = torch.rand(5, 4)
    found = certify(model, [(x, model(x).argmax(1))])
    assert (found.radius > 1e30).all()
    wrong = (model(x).argmax(1) + 1) % 3
    assert (certify(model, [(x, wrong)]).radius == 0).all()
    assert (certify(nn.Sequential(model, nn.Tanh()), [(x, model(x).argmax(1))]).radius > 1e30).all()


def in_place_model() -> nn.Sequential:
    return nn.Sequential(nn.Hardtanh(0.25, 0.75, inplace=True), nn.Flatten(), CayleyLinear(16, 3)).eval()


@pytest.mark.filterwarnings("ignore:there are .* points with zero gradient")
def test_a_first_layer_that_works_in_place_is_attacked_and_verified() -> None:
    pytest.importorskip("pyautoattack")
    model, x = in_place_model(), torch.rand(6, 1, 4, 4)
    before, labels = x.clone(), model(x.clone()).argmax(1)
    assert 0 < empirical_lipschitz(model, x, 0.1).max() <= 1 + 1e-5
    assert verify(model, x).faults == []
    radius = certify(model, [(x, labels)]).radius
    assert not cross_examine(model, x, labels, radius, iterations=3, restarts=1).any()
    assert cross_examine(model, x, labels, 20 + radius, iterations=3, restarts=1).any()
    assert torch.equal(x, before)


@pytest.mark.parametrize("copied", [in_double, lambda model: export(model, (4,))])
@pytest.mark.parametrize("members", [{}, {"forward": lambda self, x: 5 * x}])
def test_copies_do_not_leave_out_the_hooks_of_a_graph(
    copied: Callable[[nn.Module], nn.Module], members: dict[str, object]
) -> None:
    """torch does not copy them; and the copy of a subclass, even of one without members, calls itself without end."""
    model = nn.Sequential(identity_graph(), CayleyLinear(4, 4))
    assert copied(model) is not None
    handle = model[0].register_forward_hook(lambda module, inputs, output: 5 * output)
    with pytest.raises(TypeError, match=r"forward hooks of 0 \(GraphModule\)"):
        copied(model)
    handle.remove()
    model[0].__class__ = type("Mine", (type(model[0]),), members)
    with pytest.raises(TypeError, match="leaves out what Mine does, at 0"):
        copied(model)


@pytest.mark.parametrize("copied", [in_double, lambda model: export(model, (4,))])
def test_copies_do_not_leave_out_hooks_of_all_modules(copied: Callable[[nn.Module], nn.Module]) -> None:
    handle = register_module_forward_hook(
        lambda module, inputs, output: 5 * output if isinstance(module, CayleyLinear) else None
    )
    try:
        with pytest.raises(TypeError, match="hooks of all modules"):
            copied(nn.Sequential(CayleyLinear(4, 4)))
    finally:
        handle.remove()


def test_in_double_refuses_methods_of_an_instance() -> None:
    """A copy would call those of the original, in its precision."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), CayleyConv2d(2, 2, 3))
    convolve = model[0]._conv_forward
    model[0]._conv_forward = lambda *args: 5 * convolve(*args)
    with pytest.raises(TypeError, match=r"the own _conv_forward of 0 \(Conv2d\)"):
        in_double(model)


def test_a_number_that_is_added_is_rounded() -> None:
    """0.1 is another number in float32 than in float64; the slack allows for it."""
    model = fx.symbolic_trace(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    node = next(iter(reversed(model.graph.nodes)))
    with model.graph.inserting_before(node):
        node.args = (model.graph.call_function(torch.add, (node.args[0], 1e6 + 0.1)),)
    model.recompile()
    x = torch.rand(2, 4)
    error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
    assert (error > 1e-3).all()
    assert (error <= rounding_bound(model, (4,), 2.0)).all()
    assert (certify(model, [(x, torch.tensor([0, 1]))]).slack >= error).all()


@pytest.mark.parametrize("f", [nn.Conv2d(2, 2, 3), nn.Flatten()])
def test_a_concatenation_names_shapes_that_do_not_fit(f: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"ConcatResidual .* got \(1, 2, 4, 4\) and \(1, "):
        ConcatResidual(f)(torch.rand(1, 4, 4, 4))


def test_the_corners_of_hardtanh_are_rounded() -> None:
    """In float32 they are not the numbers that they are in float64."""
    model, x = nn.Hardtanh(-0.1, 0.7), torch.full((1, 9), 3.0)
    error = torch.dist(model(x).double(), in_double(model)(x.double())).item()
    assert 0 < error <= rounding_bound(model, (9,), 9.0) < 1e-5


@pytest.mark.parametrize("members", [{}, {"forward": lambda self, x: 5 * x}])
def test_in_double_refuses_subclasses_of_a_parametrized_layer(members: dict[str, object]) -> None:
    """It puts the class from before the parametrization in place of the one that torch made, and of no other."""
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", Triple())
    assert in_double(layer) is not None
    layer.__class__ = type("Beyond", (type(layer),), members)
    with pytest.raises(TypeError, match="leaves out what Beyond does, at Beyond"):
        in_double(layer)


def test_a_model_whose_gradient_is_overwritten_is_not_attacked() -> None:
    """Seed 14560: ReLU needs its result for the gradient, and the next layer overwrites it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LeakyReLU(inplace=True))
    x, y = torch.randn(2, 3), torch.zeros(2, dtype=torch.long)
    for attack in (lambda: empirical_lipschitz(model, x, 1.0), lambda: pgd(model, x, y, L2Ball(1.0))):
        with pytest.raises(TypeError, match=r"a layer \(LeakyReLU\) works in place on what another one needs"):
            attack()


@pytest.mark.slow
def test_what_onnx_lacks_is_said_in_a_line(tmp_path) -> None:
    """Seed 14275: torch's orthogonal parametrization is a matrix exponential, which ONNX does not have."""
    pytest.importorskip("onnxscript")
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="matrix_exp")
    with pytest.raises(ValueError, match=r"Sequential cannot be written as ONNX: .*linalg_matrix_exp"):
        to_onnx(nn.Sequential(layer), torch.randn(2, 4), tmp_path / "model.onnx")


@pytest.mark.parametrize("certificate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_pool_with_a_divisor_of_its_own_in_onnx(certificate: bool, tmp_path: Path) -> None:
    """torch's exporter leaves `divisor_override` out; the file was off by 0.5, without a word."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pool = nn.AvgPool2d(2, 3, divisor_override=3, count_include_pad=False)
    model, x = nn.Sequential(pool, nn.Flatten(), CayleyLinear(4, 2)).eval(), torch.randn(3, 1, 6, 6)
    assert to_onnx(model, x, tmp_path / "model.onnx", certificate=certificate) is certificate
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for logits in session.run(None, {"images": x.numpy()}):
        torch.testing.assert_close(torch.tensor(logits).float(), model(x).detach(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_log_of_a_sigmoid_in_onnx(tmp_path: Path) -> None:
    """torch's exporter takes the logarithm of a sigmoid, which is 0 at -200; the file had no numbers in it."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = nn.Sequential(Scale(200.0), nn.LogSigmoid()), torch.tensor([[-1.0, 0.0, 1.0], [0.1, -0.6, 0.5]])
    to_onnx(model, x, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    torch.testing.assert_close(torch.tensor(session.run(None, {"images": x.numpy()})[0]), model(x))


class DividedSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 2, divisor_override=3).flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("certificate", [False, True])
def test_both_logits_of_a_file_are_compared(certificate: bool, tmp_path: Path) -> None:
    """The float64 logits of this model are right, and its float32 logits are not."""
    pytest.importorskip("onnxruntime")
    with pytest.raises(ValueError, match="is wrong: its logits differ by"):
        to_onnx(DividedSum(), torch.rand(3, 1, 4, 4), tmp_path / "model.onnx", certificate=certificate)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_differs_from_the_model_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.AvgPool2d(2, ceil_mode=True, divisor_override=3), nn.Flatten(), nn.Linear(9, 2)).eval()
    with pytest.raises(ValueError, match=r"is wrong: its logits differ by .*; no file was written"):
        to_onnx(model, torch.rand(3, 1, 5, 5), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class Tripled(CayleyLinear):
    def operator(self, *args: Any) -> Tensor:
        return 3 * super().operator(*args)


@torch.no_grad()
def test_a_class_that_is_replaced_after_the_first_call() -> None:
    """The layer went on with the operator of its first class, and copies of it did not."""
    layer, x = CayleyLinear(4, 4).eval(), torch.rand(2, 4)
    before = layer(x) - layer.bias
    layer.__class__ = Tripled
    torch.testing.assert_close(layer(x) - layer.bias, 3 * before)
    torch.testing.assert_close(in_double(layer)(x.double()).float(), layer(x))
    assert lipschitz_bound(layer, (4,)) == pytest.approx(3, rel=1e-5)
