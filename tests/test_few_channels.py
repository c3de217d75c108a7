"""Convolutions of few channels, and sums with them: the same derivatives as torch's, found in fewer passes."""

import pytest
import torch
from oracles import conv_matrix
from torch import Tensor
from torch.nn import functional as F

from orthoconv import budget
from orthoconv.linalg import gram_factor, norms
from orthoconv.nn import BROConv2d, CPLConv2d, kernel
from orthoconv.nn.kernel import add_channels, same_conv2d


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Take the way of few channels for small images, too; list what took it."""
    shapes, own = [], kernel._convolve_few
    monkeypatch.setattr(budget, "DENSE_PIXELS", 0)
    monkeypatch.setattr(kernel, "_convolve_few", lambda x, *rest: shapes.append(x.shape) or own(x, *rest))
    return shapes


@pytest.mark.parametrize("biased", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shape", "size"), [((9, 1, 3, 3), (3, 4)), ((12, 2, 2, 3), (3, 2)), ((7, 2, 1, 4), (1, 3))])
def test_a_convolution_of_few_channels(taken: list[torch.Size], shape: tuple[int, ...], size, biased: bool) -> None:
    x, weight, bias = double(2, shape[1], *size), double(*shape), double(shape[0]) if biased else None
    inputs = (x, weight, bias) if biased else (x, weight)
    expected = x.detach().flatten(1) @ conv_matrix(weight.detach(), size).mT
    expected = expected.view(2, shape[0], *size) + (0 if bias is None else bias.detach()[:, None, None])
    torch.testing.assert_close(same_conv2d(*inputs), expected)
    assert torch.autograd.gradcheck(same_conv2d, inputs)
    assert torch.autograd.gradgradcheck(same_conv2d, inputs, fast_mode=True)
    torch.autograd.gradcheck(lambda x: same_conv2d(x, *(t.detach() for t in inputs[1:])), (x,))
    assert taken


def test_other_convolutions_are_left_to_torch(taken: list[torch.Size]) -> None:
    same_conv2d(double(1, 4, 4, 4), double(8, 4, 3, 3))
    same_conv2d(double(1, 2, 4, 4), double(18, 1, 3, 3), groups=2)
    same_conv2d(double(1, 1, 6, 6), double(9, 1, 3, 3), dilation=(2, 2))
    same_conv2d(double(1, 1, 4, 4).detach(), double(9, 1, 3, 3))
    assert not taken


@pytest.mark.parametrize(("i", "o", "groups"), [(2, 3, 1), (3, 2, 1), (2, 2, 1), (2, 3, 2), (3, 1, 2)])
def test_a_sum_with_the_first_channels(i: int, o: int, groups: int) -> None:
    y, x = double(2, groups * o, 2, 3), double(2, groups * i, 2, 3)

    def total(y: Tensor, x: Tensor) -> Tensor:
        return add_channels(y * 1, x, groups)

    parts = [F.pad(part, (0, 0, 0, 0, 0, o))[:, :o] for part in x.chunk(groups, 1)]
    expected = y + torch.cat(parts, 1)
    assert torch.equal(total(y, x), expected)
    assert torch.equal(torch.vmap(total)(y[:, None], x[:, None]), expected[:, None])
    with torch.no_grad():
        assert torch.equal(total(y, x), expected)
    assert torch.autograd.gradcheck(total, (y, x))
    assert torch.autograd.gradcheck(total, (y, x.detach()))
    assert torch.autograd.gradgradcheck(total, (y, x))


def test_a_sum_overwrites_and_torch_knows() -> None:
    x, y = double(1, 2, 2, 2), double(1, 3, 2, 2).exp()
    z = add_channels(y, x)
    assert z.data_ptr() == y.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()  # exp needs its own result


@pytest.mark.parametrize(
    "layer", [BROConv2d(2, 20, 3, rank=2, dtype=torch.float64), CPLConv2d(3, 32, 3, dtype=torch.float64)]
)
def test_layers_whose_inner_images_have_few_channels(taken, monkeypatch, layer: torch.nn.Module) -> None:
    x = double(2, layer.in_channels, 9, 8)
    gradients = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    assert taken
    monkeypatch.setattr(budget, "DENSE_PIXELS", 10**6)
    others = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(gradients, others)


def test_well_conditioned_matrices_need_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    V = torch.randn(7, 64, 16, dtype=torch.complex64)
    W = torch.randn(5, 6, 4, dtype=torch.float64)
    assert (norms._quick_bound(W) >= torch.linalg.matrix_norm(W, 2)).all()
    assert gram_factor(V[..., :1].expand(7, 64, 2)) is None
    monkeypatch.setattr(norms, "norm_bound", None)
    assert gram_factor(V) is not None
