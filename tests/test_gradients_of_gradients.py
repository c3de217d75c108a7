"""A gradient with a graph has the numbers of one without, also where inputs of a layer depend on each other."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from orthoconv.nn import CayleyConv2d, CayleyLinear
from orthoconv.nn.methods import conv_method, conv_methods, linear_method, linear_methods


def assert_same_gradients(f, parameters: list[Tensor]) -> None:
    plain = torch.autograd.grad(f(), parameters)
    graph = torch.autograd.grad(f(), parameters, create_graph=True)
    for a, b in zip(graph, plain, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", conv_methods())
@pytest.mark.parametrize("training", [True, False])
def test_a_convolution_applied_twice(method: str, training: bool) -> None:
    torch.manual_seed(0)
    layer = conv_method(method)(2, 2, 3, dtype=torch.float64).train(training)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert_same_gradients(lambda: layer(layer(x).sin()).cos().sum(), [x, *_differentiable(layer)])


@pytest.mark.parametrize("method", linear_methods())
def test_a_linear_layer_applied_twice(method: str) -> None:
    torch.manual_seed(0)
    layer = linear_method(method, "cayley")(4, 4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert_same_gradients(lambda: layer(layer(x).sin()).cos().sum(), [x, *_differentiable(layer)])


def _differentiable(layer: nn.Module) -> list[Tensor]:
    return [p for p in layer.parameters() if p.requires_grad]


@pytest.mark.parametrize("way", ["lifted", "fused", "matrices"])
def test_a_first_layer_in_every_way(way: str) -> None:
    """The lifted way passes x, and a function of x, to one hand-written gradient."""
    torch.manual_seed(0)
    layer, x = CayleyConv2d(3, 32, 3, dtype=torch.float64), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    x.requires_grad_()
    with CayleyConv2d.forced(way):
        assert_same_gradients(lambda: layer(x).cos().sum(), [x, layer.weight])
        d = torch.randn_like(x)
        (g,) = torch.autograd.grad(layer(x).cos().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(g.square().sum() / 2, x)  # the Hessian times g
        step = 1e-5
        (above,), (below,) = (torch.autograd.grad(layer(x + s * g.detach()).cos().sum(), x) for s in (step, -step))
        torch.testing.assert_close((second * d).sum(), ((above - below) / (2 * step) * d).sum(), rtol=1e-6, atol=1e-8)


def test_one_parameter_computed_from_another_in_eval_mode() -> None:
    torch.manual_seed(0)
    layer, x = CayleyLinear(5, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    w = layer.weight.detach().clone().requires_grad_()

    def gradient() -> Tensor:
        y = functional_call(layer, {"weight": w, "g": w.norm()}, x)
        return torch.autograd.grad(y.cos().sum(), w)[0]

    training = gradient()
    layer.eval()
    torch.testing.assert_close(gradient(), training)


def test_the_control_sees_a_path_that_counts_twice() -> None:
    """An input that is an ancestor of another one has its gradient twice, if they are not set apart."""
    x = torch.tensor(2.0, requires_grad=True)
    y = x * 3
    together = torch.autograd.grad(x * y, (x, y), create_graph=True)
    apart = torch.autograd.grad((a := x.view_as(x)) * (b := y.view_as(y)), (a, b), create_graph=True)
    assert [g.item() for g in together] == [12.0, 2.0]
    assert [g.item() for g in apart] == [6.0, 2.0]
