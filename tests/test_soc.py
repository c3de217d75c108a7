"""What the contract does not ask of exponentials of skew convolutions: large weights, the start, the linear layer."""

import math
from contextlib import nullcontext

import pytest
import torch
from contract import skew_exponential
from oracles import conv_matrix, downsample_matrix
from torch import nn
from torch.func import functional_call

from orthoconv import frozen, linalg
from orthoconv.nn import ExpLinear, SOCConv2d, TaylorSOCConv2d, TaylorSOCConvTranspose2d
from orthoconv.nn import soc as nn_soc
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix, orthogonality_error

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("norm", [0.0, 1e-3, 1.0, 30.0, 1e3])
def test_exponential_and_its_gradient_are_those_of_torch(norm: float, dtype: torch.dtype) -> None:
    W = (norm * torch.randn(3, 5, 5, dtype=dtype) / 3).requires_grad_()
    found, expected = linalg.skew_exponential(W), torch.linalg.matrix_exp(0.5 * (W - W.mH))
    torch.testing.assert_close(found, expected, atol=1e-14 * max(1, norm), rtol=0)
    G = torch.randn_like(expected)
    gradients = [torch.autograd.grad(value, W, G)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12 * max(1, norm), rtol=0)


def test_second_derivatives_of_the_exponential() -> None:
    W = torch.randn(2, 3, 3, dtype=torch.complex128, requires_grad=True)
    torch.autograd.gradcheck(linalg.skew_exponential, W)
    torch.autograd.gradgradcheck(linalg.skew_exponential, W[:1].detach().requires_grad_())


@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e6])
def test_exponentials_stay_orthogonal_in_float32(norm: float) -> None:
    Q = linalg.skew_exponential(norm * torch.randn(3, 32, 32, dtype=torch.complex64))
    assert (torch.linalg.svdvals(Q.to(torch.complex128)) - 1).abs().max() <= 2e-6 * math.sqrt(32)


@pytest.mark.parametrize("padding_mode", ["circular", "zeros"])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("terms", [1, 3, 12])
def test_taylor_form_is_nonexpansive_for_any_weight(terms: int, norm: float, padding_mode: str) -> None:
    layer = TaylorSOCConv2d(4, 4, 3, terms=terms, padding_mode=padding_mode, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(norm / layer.weight.norm())
    values = torch.linalg.svdvals(dense_matrix(layer, (4, 6, 5)))
    assert values.max() <= min(1 + 1e-12, layer.lipschitz((4, 6, 5)) + 1e-12)
    assert values.min() >= 1 - 2 / math.factorial(terms + 1) - 1e-12


@pytest.mark.parametrize("kind", [TaylorSOCConv2d, TaylorSOCConvTranspose2d])
@pytest.mark.parametrize(
    ("i", "o", "k", "options"),
    [
        (3, 3, 3, {}),
        (2, 5, (2, 4), {}),
        (4, 2, 3, {"groups": 2, "dilation": (1, 2)}),
        (2, 8, 6, {"stride": 2}),
    ],
    ids=str,
)
def test_padding_by_zeros_is_the_series_of_the_skew_matrix_on_the_image(kind, i, o, k, options) -> None:
    """The matrix of A is a part of that on a torus so large that no tap wraps; the matrix of the layer is not."""
    i, o = (o, i) if kind is TaylorSOCConvTranspose2d else (i, o)
    layer = kind(i, o, k, terms=4, padding_mode="zeros", bias=False, dtype=torch.float64, **options)
    (h, w), g, s = (4, 6), layer.groups, layer.stride[0]
    blocks = []
    for part in layer.kernel.detach().chunk(g):
        c, torus = len(part), (h + 8, w + 8)
        A = conv_matrix(part, torus, layer.dilation).view(c, *torus, c, *torus)
        A = A[:, :h, :w, :, :h, :w].reshape(c * h * w, -1)
        torch.testing.assert_close(A, -A.mT, rtol=0, atol=0)
        powers = [torch.linalg.matrix_power(A, n) / math.factorial(n) for n in range(5)]
        rows, columns = layer.kernel_shape[0] // g, layer.kernel_shape[1]
        blocks.append(sum(powers)[: rows * h * w, : columns * h * w] / (1 + 1 / 120))
    inputs = o if layer.transposed else i
    expected = torch.block_diag(*blocks) @ downsample_matrix(inputs, (s * h, s * w), (s, s))
    shape = (i, h, w) if layer.transposed else (i, s * h, s * w)
    found = dense_matrix(layer, shape)
    torch.testing.assert_close(found, expected.mT if layer.transposed else expected)
    assert torch.linalg.svdvals(found)[0] <= layer.lipschitz(shape) + 1e-15
    x = torch.randn(2, *shape, dtype=torch.float64)
    for twin in (layer.in_double(), layer.exported(shape)):
        torch.testing.assert_close(twin(x), layer(x), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(layer.in_double()(x[0]), layer(x[0]))
    inputs = (layer.weight.detach().requires_grad_(), x[:1].requires_grad_())
    assert torch.autograd.gradcheck(lambda W, x: functional_call(layer, {"weight": W}, x), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda W, x: functional_call(layer, {"weight": W}, x), inputs, fast_mode=True)


def test_zeros_lose_norm_in_other_forms_of_the_exponential() -> None:
    """The negative control: a part of the circular layer, as other methods have it, is no isometry."""
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64)
    for kind, keeps in ((TaylorSOCConv2d, True), (SOCConv2d, False)):
        layer = kind(4, 4, 3, padding_mode="zeros", bias=False, dtype=torch.float64)
        assert (abs(layer(x).norm() / x.norm() - 1) < 1e-8) == keeps


def test_the_bound_with_zeros_follows_the_weight_and_counts_the_rest() -> None:
    layer = TaylorSOCConv2d(2, 2, 3, terms=2, padding_mode="zeros", dtype=torch.float64)
    with torch.no_grad():
        layer.weight.zero_()[0, 1], layer.weight[1, 0] = 1, -1
        norm = torch.linalg.svdvals(dense_matrix(layer, (2, 12, 12))).amax()
        assert 7 / 6 * norm > 1.05, "the negative control: the sum itself has a norm above 1"
        assert norm <= layer.lipschitz((2, 12, 12)) <= 1
        layer.weight.mul_(1e-3)
        assert layer.lipschitz((2, 12, 12)) < 0.86


def test_the_bound_of_the_taylor_form_is_needed() -> None:
    """Kernels of ones come close to the bound; without the division by it the norm exceeds 1."""
    layer = TaylorSOCConv2d(2, 2, 3, terms=1, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.zero_()[0, 1], layer.weight[1, 0] = 1, -1
    A = layer.singular_values((9, 9))
    assert (A * 1.5).max() > 1.2  # of the sum itself
    assert_nonexpansive(layer, (2, 9, 9), atol=1e-12)
    with pytest.raises(ValueError, match="terms must be a positive int, got 0"):
        TaylorSOCConv2d(2, 2, 3, terms=0)
    with pytest.raises(ValueError, match="odd number of dilated taps"):
        TaylorSOCConv2d(2, 2, 4, dilation=2)


def test_many_terms_are_the_exponential() -> None:
    taylor = TaylorSOCConv2d(3, 5, 3, terms=20, dtype=torch.float64)
    exact = SOCConv2d(3, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        exact.weight.copy_(taylor.kernel)
        exact.bias.copy_(taylor.bias)
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(taylor(x), exact(x))


@pytest.mark.parametrize("terms", [*range(1, 18), 25, 200])
def test_terms_of_the_exponential(terms: int) -> None:
    A = torch.randn(2, 3, 3, dtype=torch.complex128)
    expected = sum(torch.matrix_power(A, k) * (1 / math.factorial(k)) for k in range(min(terms, 100) + 1))
    torch.testing.assert_close(linalg.exponential_terms(A, terms), expected)
    if terms < 18:
        assert (linalg.exponential_terms(A, terms + 1) - expected).abs().max() > 1e-12, "the negative control"


@pytest.mark.parametrize(("i", "o", "groups"), [(3, 5, 1), (6, 4, 2)])
@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"stride": 2}], ids=str)
@pytest.mark.parametrize("terms", [1, 5, 12])
def test_series_in_space_and_at_each_frequency_are_the_same(i, o, groups, options, terms, monkeypatch) -> None:
    layer = TaylorSOCConv2d(i, o, 3, terms=terms, groups=groups, dtype=torch.float64, **options)
    x = torch.randn(3, i, 6, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(layer(x))
    found = []
    for frequencies in (True, False):
        monkeypatch.setattr(layer, "_go_by_frequencies", lambda *_, way=frequencies: way)
        y = layer(x)
        gradients = torch.autograd.grad(y, (x, *layer.parameters()), grad, create_graph=True)
        (second,) = torch.autograd.grad(gradients[0].square().sum(), layer.weight)
        inner = torch.ones(2, o, 5, 4, dtype=torch.float64).cumsum(3)
        found.append((y, *gradients, second, layer.convolve(inner, None, adjoint=True)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_remembered_matrices_are_those_of_the_weight() -> None:
    layer, x = TaylorSOCConv2d(4, 4, 3).eval(), torch.randn(64, 4, 6, 6)
    with torch.no_grad():
        first = layer(x)
        torch.testing.assert_close(layer(x), first, atol=0, rtol=0)
        layer.weight.mul_(-1)
        layer.terms = 3
        torch.testing.assert_close(layer(x), layer.train()(x))
    torch.testing.assert_close(layer.eval()(x), layer.train()(x))
    assert (layer(x) - first).abs().max() > 0.01, "the negative control: another weight"


def test_matrices_are_formed_once(monkeypatch) -> None:
    """In eval mode and inside `frozen`, for each of several image sizes, with gradients of the input or without."""
    layer, formed, form = TaylorSOCConv2d(4, 4, 3), [], nn_soc.exponential_terms
    monkeypatch.setattr(nn_soc, "exponential_terms", lambda *args: formed.append(args) or form(*args))
    batches = [torch.randn(64, 4, n, n, requires_grad=True) for n in (4, 6, 8, 10)]
    for context in (frozen(layer), frozen(layer.eval()), nullcontext()):
        formed.clear()
        with context:
            for x in 3 * batches:
                torch.autograd.grad(layer(x).sum(), x)
                with torch.no_grad():
                    layer(x)
        assert len(formed) == len(batches)
        layer.train().eval()


def test_large_batches_go_by_frequencies() -> None:
    layer = TaylorSOCConv2d(64, 64, 3)
    assert layer._go_by_frequencies(torch.empty(256, 64, 16, 16))
    assert not layer._go_by_frequencies(torch.empty(1, 64, 16, 16))


def test_the_series_can_be_trained_from_the_identity() -> None:
    layer, x = TaylorSOCConv2d(4, 4, 3, identity=True, dtype=torch.float64), torch.randn(2, 4, 6, 6).double()
    for _ in range(3):
        layer.zero_grad()
        layer(x)[:, 0].square().sum().backward()
        assert layer.weight.grad.isfinite().all()
        with torch.no_grad():
            layer.weight -= 0.1 * layer.weight.grad / layer.weight.grad.norm().clamp_min(1e-3)
    assert layer.weight.abs().max() > 0
    assert_nonexpansive(layer, (4, 6, 6), atol=1e-12)
