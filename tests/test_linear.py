import pytest
import torch

from orthoconv import cayley, frozen
from orthoconv.nn import CayleyLinear
from orthoconv.testing import assert_orthogonal

SHAPES = [(3, 3), (2, 7), (7, 2), (9, 1), (1, 4), (9, 4)]


@pytest.mark.parametrize(("i", "o"), SHAPES)
@pytest.mark.parametrize("b", [1, 3, 20])
@pytest.mark.parametrize("signs", [None, "random"])
def test_every_way_of_applying_is_the_same_orthogonal_map(i: int, o: int, b: int, signs: str | None) -> None:
    layer, x = CayleyLinear(i, o, dtype=torch.float64, signs=signs), torch.randn(b, i, dtype=torch.float64)
    Q = cayley(layer.kernel).detach() * (1 if signs is None else layer.signs)
    expected = x @ Q.mT + layer.bias
    torch.testing.assert_close(layer(x), expected)
    with frozen(layer):
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), expected)
    torch.testing.assert_close(layer(x.view(b, 1, 1, i)), expected.view(b, 1, 1, o))
    torch.testing.assert_close(layer(x[0]), expected[0])
    assert_orthogonal(layer, (i,), atol=1e-12)


@pytest.mark.parametrize(("i", "o"), SHAPES)
@pytest.mark.parametrize("b", [1, 9])
def test_gradients(i: int, o: int, b: int) -> None:
    layer, x = CayleyLinear(i, o, dtype=torch.float64), torch.randn(b, i, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (x, *(p.detach().requires_grad_() for p in parameters))
    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs)


def test_parameters() -> None:
    assert {n for n, _ in CayleyLinear(3, 2).named_parameters()} == {"weight", "g", "bias"}
    layer = CayleyLinear(3, 2, bias=False)
    assert layer.bias is None
    torch.testing.assert_close(layer.kernel, layer.weight)
    assert "bias=False" in repr(layer)


@pytest.mark.parametrize(("i", "o"), [(65, 60), (300, 256), (256, 64)])
def test_training_and_eval_agree_for_large_weights(i: int, o: int) -> None:
    layer, x = CayleyLinear(i, o), torch.randn(4, i)
    with torch.no_grad():
        layer.g.mul_(1e3 / torch.linalg.matrix_norm(layer.weight, ord=2))
    torch.testing.assert_close(layer(x), layer.eval()(x), atol=1e-3, rtol=1e-3)
