"""Bounds are found for one example: what mixes the examples of a batch has none, nor what a graph does in secret."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from orthoconv import lipschitz_bound, register_rule
from orthoconv.nn import MaxMin

Forward = Callable[[nn.Module, Tensor], Tensor]


class Leaves(fx.Tracer):
    """Goes into no module."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def bound(forward: Forward, shape: tuple[int, ...], part: nn.Module | None = None) -> float:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity() if part is None else part

    Model.forward = forward  # type: ignore[method-assign, assignment]
    model = Model()
    return lipschitz_bound(fx.GraphModule(model, Leaves().trace(model)), shape)


@pytest.mark.parametrize(
    ("forward", "shape"),
    [
        (lambda self, x: x + x.transpose(0, 1), (1,)),
        (lambda self, x: x + x.reshape(1, -1), (1,)),
        (lambda self, x: torch.cat((x, x), 0), (3,)),
        (lambda self, x: x.flatten(0), (3,)),
        (lambda self, x: x.view(2, -1).view(1, -1), (4,)),
        (lambda self, x: x.reshape(-1, x.size(0)).transpose(0, 1), (4,)),  # rows of a batch, dealt out as cards
    ],
)
def test_graphs_that_mix_examples(forward: Forward, shape: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match=r"examples of a batch apart"):
        bound(forward, shape)


def test_a_batch_as_an_axis_of_a_convolution() -> None:
    with pytest.raises(TypeError, match="but not two"):
        lipschitz_bound(nn.Sequential(nn.Conv2d(1, 1, 3)), (8, 8))
    with pytest.raises(TypeError, match=r"apart|but not two"):
        bound(lambda self, x: self.part(x.transpose(0, 1)).transpose(0, 1), (1, 8, 8), nn.Conv2d(1, 1, 3))


class SortExamples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sort(0).values


@pytest.mark.parametrize("layer", [nn.Flatten(0), nn.Unflatten(0, (1, -1)), SortExamples()])
def test_modules_that_mix_examples(layer: nn.Module) -> None:
    register_rule(SortExamples, lipschitz=1.0, rounding=0.0)
    with pytest.raises(TypeError, match="mixes the examples of a batch, for inputs of shape"):
        lipschitz_bound(nn.Sequential(nn.ReLU(), layer), (4,))


def test_a_module_with_two_values() -> None:
    with pytest.raises(TypeError, match=r"Sequential.0 \(MaxPool2d\) returns a tuple"):
        lipschitz_bound(nn.Sequential(nn.MaxPool2d(2, return_indices=True)), (1, 4, 4))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (lambda z: torch.cat((x, x), 1, out=z) + z)(torch.cat((x, x), 1)),
        lambda self, x: x.view(torch.int32),
        lambda self, x: x.view(x.dtype),
        lambda self, x: F.relu(x, True) + x,
        lambda self, x: self.part(x) + x,
    ],
)
def test_graphs_that_do_more_than_their_operation_says(forward: Forward) -> None:
    with pytest.raises(TypeError, match=r"in place|no rule for"):
        bound(forward, (4,), nn.Sequential(nn.LeakyReLU(5.0, inplace=True)))


def test_graphs_that_keep_examples_apart() -> None:
    assert bound(lambda self, x: x.view(x.size(0), -1), (2, 3)) == 1
    assert bound(lambda self, x: x.reshape(-1, 6).contiguous(), (2, 3)) == 1
    assert bound(lambda self, x: F.relu(x.transpose(1, 2), False), (2, 3)) == 1
    assert bound(lambda self, x: torch.permute(x, dims=(0, 2, 1)).flatten(start_dim=1), (2, 3)) == 1
    assert bound(lambda self, x: torch.cat((x, self.part(x)), dim=1), (2, 3), MaxMin(1)) == pytest.approx(2**0.5)
    with torch.inference_mode():
        assert bound(lambda self, x: x + self.part(x), (3,)) == 2
