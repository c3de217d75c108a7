import pytest
import torch

from orthoconv import cayley, frozen, lipschitz_bound, models
from orthoconv.nn import (
    BaseLinear,
    BjorckLinear,
    BROLinear,
    CayleyLinear,
    ExpLinear,
    FrobeniusLinear,
    NormalizedLinear,
    PolarLinear,
    QRLinear,
)
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix

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


@pytest.mark.parametrize(
    ("i", "o", "b"),  # the quick suite has half of the shapes with one vector, and half with many
    [
        pytest.param(i, o, b, marks=[] if b == (1, 9)[k % 2] else [pytest.mark.slow])
        for k, (i, o) in enumerate(SHAPES)
        for b in (1, 9)
    ],
)
def test_gradients(i: int, o: int, b: int) -> None:
    layer, x = CayleyLinear(i, o, dtype=torch.float64), torch.randn(b, i, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (x, *(p.detach().requires_grad_() for p in parameters))
    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


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


# Inverses


@pytest.mark.parametrize("kind", [CayleyLinear, PolarLinear, QRLinear, ExpLinear, BROLinear, BjorckLinear])
@pytest.mark.parametrize(("i", "o"), [(3, 3), (2, 7), (1, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_inverse_is_the_pseudo_inverse(kind: type[BaseLinear], i: int, o: int, bias: bool) -> None:
    layer, x = kind(i, o, bias, dtype=torch.float64), torch.randn(2, 5, i, dtype=torch.float64)
    y = torch.randn(2, 5, o, dtype=torch.float64)
    constant = layer.bias.detach() if layer.bias is not None else 0
    expected = (y - constant) @ torch.linalg.pinv(dense_matrix(layer, (i,))).mT
    for mode in (True, False):
        layer.train(mode)
        torch.testing.assert_close(layer.inverse(y), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=1e-9)
        torch.testing.assert_close(layer.inverse(y[0, 0]), expected[0, 0], rtol=0, atol=1e-9)


def test_the_inverse_has_gradients_and_can_be_transformed() -> None:
    layer, y = PolarLinear(3, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer.inverse, (y,))
    layer.inverse(y).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    torch.testing.assert_close(torch.func.vmap(layer.inverse)(y), layer.inverse(y))


def test_the_inverse_of_a_large_layer_in_float32() -> None:
    for kind in (CayleyLinear, PolarLinear):
        layer, x = kind(512, 600), torch.randn(4, 512)
        torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=1e-4)


# Rows of norm 1


@pytest.mark.parametrize(("i", "o"), SHAPES)
def test_normalized_rows_have_norm_one(i: int, o: int) -> None:
    layer, x = NormalizedLinear(i, o, dtype=torch.float64), torch.randn(5, i, dtype=torch.float64)
    W = torch.randn(o, i, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(W)
    torch.testing.assert_close(layer(x), x @ torch.nn.functional.normalize(W).mT + layer.bias)
    assert lipschitz_bound(layer, (i,)) >= 1 - 1e-12
    assert layer.promise is None
    inputs = (x.requires_grad_(), W.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, W: x @ layer.operator((1, 1), W).mT, inputs)
    assert torch.autograd.gradgradcheck(lambda x, W: x @ layer.operator((1, 1), W).mT, inputs)


@pytest.mark.parametrize("size", [1e-35, 1.0, 1e18])
def test_normalized_rows_of_any_size(size: float) -> None:
    """Squares of the smallest are 0 in float32; a row of zeros stays one, and has a finite gradient."""
    layer = NormalizedLinear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0]]) * size)
    torch.testing.assert_close(layer(torch.eye(3)).mT, torch.tensor([[0.6, 0.0, 0.8], [0.0, 0.0, 0.0]]))
    layer(torch.eye(3))[:, 1].sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_networks_know_normalized_layers_by_name() -> None:
    model = models.build("kwlarge", linear="normalized", width=0.125, image_size=8)
    assert isinstance(model[-1], NormalizedLinear)


# QR and Frobenius


def gram_schmidt(W: torch.Tensor) -> torch.Tensor:
    """Each column without its parts along those before it, of norm 1."""
    columns: list[torch.Tensor] = []
    for w in W.mT:
        for q in (*columns, *columns):
            w = w - (q @ w) * q
        columns.append(w / w.norm())
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("i", "o"), SHAPES)
@pytest.mark.parametrize("scale", [1e-3, pytest.param(1.0, marks=pytest.mark.slow), 1e3])
def test_qr_is_gram_schmidt(i: int, o: int, scale: float) -> None:
    layer = QRLinear(i, o, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(o, i, dtype=torch.float64) * scale)
    W = layer.weight.detach()
    expected = gram_schmidt(W) if o >= i else gram_schmidt(W.mT).mT
    torch.testing.assert_close(dense_matrix(layer, (i,)), expected)
    assert_orthogonal(layer, (i,), atol=1e-13)
    assert_orthogonal(dense_matrix(layer.float(), (i,)).double(), atol=2e-6)
    inputs = torch.randn(o, i, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda W: layer.operator((1, 1), W), inputs)
    assert torch.autograd.gradgradcheck(lambda W: layer.operator((1, 1), W), inputs)


def test_qr_of_a_singular_weight_is_orthogonal() -> None:
    layer = QRLinear(4, 6, dtype=torch.float64)
    for value in (0.0, 1.0):
        torch.nn.init.constant_(layer.weight, value)
        assert_orthogonal(layer, (4,), atol=1e-13)


@pytest.mark.parametrize(("i", "o"), SHAPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
def test_frobenius_is_never_expansive(i: int, o: int, scale: float) -> None:
    layer = FrobeniusLinear(i, o)
    W = torch.randn(o, i)
    with torch.no_grad():
        layer.weight.copy_(W * scale)
    torch.testing.assert_close(dense_matrix(layer, (i,)), W / W.norm(), rtol=1e-4, atol=1e-6)
    assert_nonexpansive(dense_matrix(layer, (i,)), atol=1e-6)
    assert layer.promise == "nonexpansive"
    layer.double()
    inputs = (W * 1.0).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda W: layer.operator((1, 1), W), inputs)
    torch.nn.init.zeros_(layer.weight)
    assert torch.equal(dense_matrix(layer, (i,)), torch.zeros(o, i, dtype=torch.float64))


@pytest.mark.parametrize(("name", "kind"), [("qr", QRLinear), ("frobenius", FrobeniusLinear)])
def test_networks_with_them(name: str, kind: type) -> None:
    model = models.build("kwlarge", linear=name, width=0.125, image_size=8)
    assert isinstance(model[-1], kind)
    assert lipschitz_bound(model, (3, 8, 8)) < 1 + 1e-5
