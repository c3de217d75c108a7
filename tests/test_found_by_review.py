"""Bounds that a review of November 2026 found too small. Each is now right, or refused."""

import math

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from orthoconv import certify, lipschitz_bound, to_onnx
from orthoconv.nn import ConcatResidual, ConvexResidual


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
    graph = fx.symbolic_trace(Own(lambda x: torch.cat(torch.tensor_split(x, (3, 1), 1), 1)))
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
