"""What the contract does not ask of almost-orthogonal layers: zero columns, bad scales, tightness, the linear layer."""

import pytest
import torch
from torch import nn

from orthoconv.nn import AOLConv2d, AOLLinear
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix

EXTREMES = [1e-3, 1.0, 1e3]


def _random(**options: int) -> AOLConv2d:
    return AOLConv2d(3, 4, 3, identity=False, **options)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("norm", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norm_is_at_most_1_for_columns_of_any_scale(steps: int, norm: float, dtype: torch.dtype) -> None:
    def make(i: int, o: int) -> AOLConv2d:
        return AOLConv2d(i, o, 2, steps=steps, identity=False, dtype=dtype)

    for layer in (make(6, 4), make(6, 6)):
        with torch.no_grad():
            layer.weight.mul_(norm * torch.logspace(0, -8, 6)[:, None, None])
        matrix = dense_matrix(layer, (6, 4, 4)).double()
        assert_nonexpansive(matrix, atol=1e-12 if dtype == torch.float64 else 2e-6 * 6**0.5)


@pytest.mark.parametrize("layer", [_random(), _random(steps=2), AOLLinear(3, 4)], ids=str)
@pytest.mark.parametrize("zeros", [slice(1, 2), slice(None)], ids=["column", "all"])
def test_zero_columns_stay_zero_and_have_finite_gradients(layer: nn.Module, zeros: slice) -> None:
    with torch.no_grad():
        layer.weight[:, zeros] = 0
    x = torch.randn((2, 3) if isinstance(layer, AOLLinear) else (2, 3, 5, 4), requires_grad=True)
    layer(x).square().sum().backward()
    for t in (x, *layer.parameters()):
        assert t.grad.isfinite().all()
    assert (layer.cached_operator()[:, zeros] == 0).all()


def test_more_steps_come_nearer_to_1() -> None:
    norms = []
    for steps in range(4):
        torch.manual_seed(1)
        norms.append(AOLConv2d(8, 8, 3, steps=steps, identity=False, dtype=torch.float64).lipschitz((8, 8, 8)))
    assert norms == sorted(norms)
    assert norms[0] < 0.9 < norms[2] <= 1


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2}, {"steps": 1}], ids=str)
@pytest.mark.parametrize(("i", "o"), [(4, 4), (4, 8), (8, 4)])
def test_the_identity_start_is_orthogonal(i: int, o: int, options: dict[str, int]) -> None:
    layer = AOLConv2d(i, o, 3, bias=False, dtype=torch.float64, **options)
    assert_orthogonal(layer, (i, 4, 6), atol=1e-12)
    if i == o and "stride" not in options:
        x = torch.randn(2, i, 4, 6, dtype=torch.float64)
        torch.testing.assert_close(layer(x), x)


@pytest.mark.parametrize(("i", "o"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_linear_layer(i: int, o: int, steps: int) -> None:
    layer = AOLLinear(i, o, steps=steps, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    W, q = layer.weight.detach(), 2**steps
    G = W @ W.mT if o < i else W.mT @ W
    D = torch.linalg.matrix_power(G, q).abs().sum(1).pow(-0.5 / q)
    torch.testing.assert_close(dense_matrix(layer, (i,)), W * (D[:, None] if o < i else D))
    assert layer.lipschitz() <= 1 + 1e-12
    x = torch.randn(2, i, dtype=torch.float64, requires_grad=True)
    weight = W.clone().requires_grad_()

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    torch.autograd.gradcheck(run, (x, weight))
    torch.autograd.gradgradcheck(run, (x, weight), fast_mode=True)


@pytest.mark.parametrize("steps", [-1, 5, 1.0, True, "2"])
def test_bad_steps_are_refused(steps: object) -> None:
    for build in (lambda: AOLConv2d(2, 2, 3, steps=steps), lambda: AOLLinear(2, 2, steps=steps)):
        with pytest.raises(ValueError, match="steps must be an int from 0 to 4, got"):
            build()
