"""What the contract does not ask of exponentials of skew convolutions: large weights, the start, the linear layer."""

import math

import pytest
import torch
from contract import skew_exponential
from torch import nn

from orthoconv.nn import ExpLinear, SOCConv2d
from orthoconv.testing import assert_orthogonal, dense_matrix, orthogonality_error

DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("i", "o"), [(16, 16), (4, 16)])
def test_convolutions_of_any_scale(norm: float, dtype: torch.dtype, i: int, o: int) -> None:
    conv = SOCConv2d(i, o, 3, dtype=dtype)
    with torch.no_grad():
        conv.weight.mul_(-norm / conv.weight.norm())
    atol = 1e-10 if dtype == torch.float64 else 2e-6 * math.sqrt(o)
    assert_orthogonal(dense_matrix(conv, (i, 4, 4)).double(), atol=atol)
    assert (conv.singular_values((32, 32)) - 1).abs().max() <= atol


def test_the_identity_start() -> None:
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    conv = SOCConv2d(4, 4, 3, identity=True, bias=False, dtype=torch.float64)
    torch.testing.assert_close(conv(x), x)
    conv(x)[:, 0].sum().backward()
    assert conv.weight.grad.isfinite().all()
    assert conv.weight.grad.norm() > 0


@pytest.mark.parametrize(("i", "o"), [(5, 5), (3, 7), (7, 3), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_linear_layer(i: int, o: int, dtype: torch.dtype) -> None:
    linear = ExpLinear(i, o, dtype=dtype)
    W, eps = linear.weight.detach().double(), torch.finfo(dtype).eps
    expected = skew_exponential(W)[:o, :i]
    torch.testing.assert_close(dense_matrix(linear, (i,)).double(), expected, atol=100 * eps, rtol=0)
    assert orthogonality_error(linear, (i,)) <= 20 * eps
    if dtype == torch.float64:
        x, weight = torch.randn(2, i, dtype=dtype, requires_grad=True), W.requires_grad_()
        run = lambda x, weight: torch.func.functional_call(linear, {"weight": weight}, (x,))  # noqa: E731
        torch.autograd.gradcheck(run, (x, weight))
        torch.autograd.gradgradcheck(run, (x, weight), fast_mode=True)
        nn.init.normal_(linear.weight, std=100)
        assert orthogonality_error(linear, (i,)) <= 1e-13
