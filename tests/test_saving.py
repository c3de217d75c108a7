"""What a Cayley layer keeps for its gradient: not its input, unless somebody else decides what is kept."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from orthoconv.autograd import _saves_as_usual, with_gradient
from orthoconv.nn import CayleyConv2d, CayleyConvTranspose2d
from orthoconv.nn.fused import cayley_conv2d

knows_hooks = pytest.mark.skipif(not _saves_as_usual(), reason="this torch does not say who saves tensors")


class Cube:
    """x^3 w, which keeps a copy of x and counts how often x is restored."""

    restored = 0

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        def restore(kept: list[Tensor]) -> Tensor:
            self.restored += 1
            return kept[0]

        def backward(grad: Tensor, needed: object, inputs: tuple[Tensor, ...], kept: tuple[Tensor, ...]):
            return 3 * grad * kept[0] ** 2 * inputs[1], grad * kept[0] ** 3

        def forward(x: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return x**3 * w, (x.clone(),)

        return with_gradient((x, w), lambda x, w: x**3 * w, forward, backward, restore=restore)


def test_the_first_input_is_restored_for_second_derivatives_alone() -> None:
    cube, x, w = Cube(), *torch.randn(2, 4, dtype=torch.float64).requires_grad_().unbind()
    assert torch.autograd.gradcheck(lambda x, w: cube(2 * x, w), (x, w))
    assert cube.restored == 0
    assert torch.autograd.gradgradcheck(lambda x, w: cube(2 * x, w), (x, w))
    assert cube.restored > 0 or not _saves_as_usual()


@knows_hooks
def test_the_input_of_a_layer_is_not_kept() -> None:
    layer, before = CayleyConv2d(4, 4, 3), torch.randn(2, 4, 16, 16, requires_grad=True)

    def is_kept(saving) -> bool:
        x = before * 2
        memory = weakref.ref(x)
        with saving:
            y = layer(x)
        del x
        kept = memory() is not None
        y.sum().backward()
        return kept

    assert not is_kept(nullcontext())
    assert is_kept(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))  # the control


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize(("o", "i"), [(3, 3), (5, 3), (3, 5)])
@pytest.mark.parametrize("size", [(4, 5), (9, 12)])
def test_second_derivatives_go_through_the_restored_input(o: int, i: int, size, adjoint: bool) -> None:
    """The gradient of a gradient's norm, against the formula by torch alone, with a graph before the layer."""
    torch.manual_seed(0)
    W = torch.randn(o, i, 3, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, o if adjoint else i, *size, dtype=torch.float64, requires_grad=True)

    def second(f) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(f(x.sin(), W).cos().sum(), (x, W), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, W))

    def kept(x: Tensor, W: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # somebody else decides
            return cayley_conv2d(x, W, adjoint=adjoint)

    ours, oracle = second(lambda x, W: cayley_conv2d(x, W, adjoint=adjoint)), second(kept)
    for a, b in zip(ours, oracle, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_checkpoints_of_torch_decide_for_themselves() -> None:
    layer = CayleyConv2d(4, 4, 3)
    x = torch.randn(2, 4, 16, 16, requires_grad=True)
    (plain,) = torch.autograd.grad(layer(x.sin()).cos().sum(), x)
    y = checkpoint(lambda x: layer(x.sin()), x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.cos().sum(), x)[0], plain)


def test_a_graph_can_be_used_twice() -> None:
    layer, x = CayleyConvTranspose2d(4, 4, 3), torch.randn(2, 4, 16, 16, requires_grad=True)
    y = layer(x).cos().sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x)[0], first)


def test_saving_without_hooks_and_edits_that_are_found() -> None:
    layer, x = CayleyConv2d(4, 6, 3), torch.randn(2, 4, 16, 16, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        layer(x).sum().backward()
    W = torch.randn(6, 4, 3, 3, requires_grad=True)
    V = W * 1.0
    y = cayley_conv2d(x, V)
    with torch.no_grad():
        V.mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
