"""The polar factor, and the layers that take it: any scale, any condition number, zero and singular weights."""

import math

import pytest
import torch
from oracles import polar as by_singular_vectors
from torch import Tensor, nn

from orthoconv.linalg import bjorck, gram_factor, orthonormal, polar
from orthoconv.nn import BROConv2d, BROLinear, LOTConv2d, PolarLinear
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix, orthogonality_error

SHAPES = [(6, 6), (20, 4), (3, 7), (1, 5), (40, 40)]
DTYPES = [torch.float64, torch.float32]


def conditioned(m: int, n: int, condition: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three matrices with that condition number, and their polar factors."""
    k, start = min(m, n), torch.complex128 if dtype.is_complex else torch.float64
    U, V = (by_singular_vectors(torch.randn(3, *shape, dtype=start)) for shape in ((m, k), (k, n)))
    s = torch.logspace(0, -math.log10(condition), k, dtype=torch.float64)
    return ((U * s) @ V).to(dtype), U @ V


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("condition", [1, 1e2, 1e4, 1e7, 1e12, 1e18])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128, torch.complex64])
def test_polar_factor(m: int, n: int, condition: float, dtype: torch.dtype) -> None:
    W, expected = conditioned(m, n, condition, dtype)
    eps = torch.finfo(dtype).eps
    for norm in (1e-3, 1.0, 1e3):
        Q = polar(norm * W)
        assert orthogonality_error(Q.to(expected.dtype)) <= 10 * eps * math.sqrt(max(m, n))
        if condition * eps < 1e-2:
            assert (Q - expected).abs().max() <= 100 * condition * eps


def test_singular_matrices_become_nonexpansive_and_zero_the_identity() -> None:
    assert torch.equal(polar(torch.zeros(2, 3, 2)), torch.eye(3, 2).expand(2, 3, 2))
    W = torch.diag(torch.tensor([3.0, 2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(polar(W), torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # which torch.func.jvp calls itself
def test_traced_and_transformed_polar_factors_are_the_same() -> None:
    W = torch.randn(5, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(polar)(W), polar(W))
    tangent = torch.randn_like(W)
    _, forward = torch.func.jvp(polar, (W,), (tangent,))
    step = 1e-6 * tangent
    torch.testing.assert_close(forward, (polar(W + step) - polar(W - step)) / 2e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layer", [LOTConv2d, BROConv2d])
@pytest.mark.parametrize("norm", [1e-3, pytest.param(1.0, marks=pytest.mark.slow), 1e3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("i", "o"), [(16, 16), (4, 16)])
def test_convolutions_of_any_scale(layer: type, norm: float, dtype: torch.dtype, i: int, o: int) -> None:
    conv = layer(i, o, 3, dtype=dtype)
    with torch.no_grad():
        conv.weight.mul_(-norm / conv.weight.norm())
    atol = 1e-10 if dtype == torch.float64 else 2e-6 * math.sqrt(o)
    assert_orthogonal(dense_matrix(conv, (i, 4, 4)).double(), atol=atol)
    assert (conv.singular_values((32, 32)) - 1).abs().max() <= atol


@pytest.mark.parametrize("layer", [LOTConv2d, BROConv2d])
def test_zero_and_singular_weights(layer: type) -> None:
    conv, x = layer(4, 4, 3, dtype=torch.float64), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    nn.init.zeros_(conv.weight)
    assert_orthogonal(conv, (4, 6, 6), atol=1e-12)
    conv(x).square().sum().backward()
    assert conv.weight.grad.isfinite().all()
    nn.init.normal_(conv.weight)
    with torch.no_grad():
        conv.weight[:, :1] = 0
        conv.weight[0] = 0
    assert_nonexpansive(conv, (4, 6, 6), atol=1e-12)
    if layer is BROConv2d:
        assert_orthogonal(conv, (4, 6, 6), atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2}], ids=str)
def test_identity_starts(options: dict[str, int]) -> None:
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    for o in (4, 8, 16):
        conv = LOTConv2d(8, o, 3, identity=True, bias=False, dtype=torch.float64, **options)
        assert_orthogonal(conv, (8, 6, 6), atol=1e-12)
        if o == 8 and "stride" not in options:
            torch.testing.assert_close(conv(x), x)
    conv = BROConv2d(8, 8, 3, identity=True, bias=False, dtype=torch.float64)
    torch.testing.assert_close(conv(x), torch.cat((-x[:, :2], x[:, 2:]), dim=1))


@pytest.mark.parametrize("layer", [PolarLinear, BROLinear])
@pytest.mark.parametrize(("i", "o"), [(5, 5), (3, 7), (7, 3), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers(layer: type, i: int, o: int, dtype: torch.dtype) -> None:
    linear = layer(i, o, dtype=dtype)
    nn.init.normal_(linear.weight, std=30)
    V = linear.weight.detach().double()
    if layer is PolarLinear:
        expected = by_singular_vectors(V)
    else:
        expected = (torch.eye(len(V)) - 2 * V @ torch.linalg.pinv(V))[:o, :i]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dense_matrix(linear, (i,)).double(), expected, atol=1e3 * eps, rtol=0)
    assert orthogonality_error(linear, (i,)) <= 20 * eps
    if dtype == torch.float64:
        x, weight = torch.randn(2, i, dtype=dtype, requires_grad=True), (V / 30).requires_grad_()
        run = lambda x, weight: torch.func.functional_call(linear, {"weight": weight}, (x,))  # noqa: E731
        torch.autograd.gradcheck(run, (x, weight))
        torch.autograd.gradgradcheck(run, (x, weight), fast_mode=True)


def test_the_rank_of_a_reflector() -> None:
    for rank in (1, 3, 8):
        Q = dense_matrix(BROConv2d(4, 8, 3, rank=rank, dtype=torch.float64), (4, 1, 1))
        assert_orthogonal(Q, atol=1e-12)
        values = torch.linalg.eigvalsh(dense_matrix(BROLinear(8, 8, rank=rank, dtype=torch.float64), (8,)))
        assert (values < 0).sum() == rank
    for rank, message in ((9, "rank must be at most 8"), (0, "rank must be a positive int"), (1.5, "positive int")):
        with pytest.raises(ValueError, match=message):
            BROConv2d(4, 8, 3, rank=rank)
        with pytest.raises(ValueError, match=message):
            BROLinear(4, 8, rank=rank)


@pytest.mark.parametrize(("m", "n"), [(150, 130), (300, 128)])
def test_large_matrices_by_eigenvalues(m: int, n: int) -> None:
    """The way of large matrices in float32 is the iteration in float64, in its value and its gradient."""
    (W, *_), (expected, *_) = conditioned(m, n, 50, torch.float32)
    G, eps = torch.randn(m, n), torch.finfo(torch.float32).eps
    for function in (polar, bjorck):
        fast, fine = W.clone().requires_grad_(), W.double().requires_grad_()
        Q = function(fast)
        assert orthogonality_error(Q.detach().double()) <= 10 * eps
        torch.testing.assert_close(Q.double(), expected, atol=50 * eps, rtol=0)
        Q.backward(G)
        function(fine).backward(G.double())
        torch.testing.assert_close(fast.grad.double(), fine.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("function", [polar, bjorck])
@pytest.mark.parametrize(("n", "dtype"), [(128, torch.float32), (12, torch.float64), (12, torch.complex128)])
def test_each_matrix_of_a_batch_goes_its_own_way(function, n: int, dtype: torch.dtype) -> None:
    """By eigenvalues or by steps, and in as many rounds as it needs: as alone, up to rounding."""
    conditions, eps = (3.0, 2e4, 10.0, 5e4), torch.finfo(dtype).eps
    matrices = [conditioned(n + 4, n, condition, dtype)[0][0] for condition in conditions]
    W = torch.stack(matrices).view(2, 2, n + 4, n).requires_grad_()
    G = torch.randn_like(W)
    Q = function(W)
    (grad,) = torch.autograd.grad((Q * G).real.sum(), W)
    for k, condition in enumerate(conditions):
        one = matrices[k].clone().requires_grad_()
        alone = function(one)
        (its,) = torch.autograd.grad((alone * G.flatten(0, 1)[k]).real.sum(), one)
        assert (Q.flatten(0, 1)[k] - alone).abs().max() <= 10 * condition * eps
        assert (grad.flatten(0, 1)[k] - its).norm() <= 100 * condition * eps * its.norm()
        assert (alone.mH @ alone - torch.eye(n)).abs().max() < 1e-4 or (function is bjorck and condition > 500)
    assert (Q[0, 0] - Q[1, 0]).abs().max() > 100 * conditions[2] * eps, "the negative control"


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_orthonormal_columns(dtype: torch.dtype) -> None:
    V = torch.randn(2, 7, 3, dtype=dtype)
    for scale in (1e-3, 1.0, 1e3, torch.tensor([1e-6, 1.0, 1e6])):
        X, U = orthonormal(scale * V), torch.linalg.qr(V).Q
        torch.testing.assert_close(X @ X.mH, U @ U.mH)
    V[..., 1] = V[..., 0]  # dependent columns, then a zero one
    assert torch.linalg.svdvals(orthonormal(V)).max() <= 1 + 1e-12
    V[..., 1] = 0
    X = orthonormal(V)
    assert (X[..., 1] == 0).all()
    assert torch.linalg.svdvals(X)[..., :2].sub(1).abs().max() <= 1e-14
    torch.autograd.gradcheck(lambda V: (X := orthonormal(V)) @ X.mH, V[:1].clone().requires_grad_())


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"dilation": 2}, {"padding_mode": "zeros"}], ids=str)
@pytest.mark.parametrize(("i", "o"), [(4, 8), (8, 4), (8, 8), (2, 16)])
def test_ways_of_a_reflector_agree(i: int, o: int, options: dict[str, object]) -> None:
    """In space around a small Fourier product, in factors, and formed."""
    x, results = torch.randn(2, i, 9, 8, dtype=torch.float64, requires_grad=True), []
    conv = BROConv2d(i, o, 3, dtype=torch.float64, **options)
    G = torch.randn(2, o, 9, 8, dtype=torch.float64)
    for way in ("lifted", "matrices"):
        with BROConv2d.forced(way):
            y = conv(x)
            results.append((y, *torch.autograd.grad(y, (x, conv.weight, conv.bias), G)))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(y, conv.in_double()(x))  # which is formed


def test_ill_conditioned_reflectors_are_as_accurate() -> None:
    conv, linear = BROConv2d(16, 16, 3), BROLinear(32, 16, rank=8)
    with torch.no_grad():
        conv.weight[:, 1] = conv.weight[:, 0] + 1e-4 * conv.weight[:, 1]
        linear.weight[:, 1] = linear.weight[:, 0] + 1e-4 * linear.weight[:, 1]
    assert gram_factor(linear.weight) is None
    assert_orthogonal(dense_matrix(conv, (16, 9, 9)).double(), atol=2e-6 * 4)
    assert_orthogonal(dense_matrix(linear, (32,)).double(), atol=2e-6 * math.sqrt(32))


def test_reflectors_whose_vectors_vanish_at_a_frequency() -> None:
    """Rounding is all that is left of them there; training and eval mode, and the inverse, agree all the same."""
    blur = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 1.0])).double()
    for rank, kernel in ((1, torch.full((3, 3), 0.3).double()), (2, blur)):
        conv = BROConv2d(4, 4, 3, rank=rank, bias=False, dtype=torch.float64)
        with torch.no_grad():
            conv.weight.copy_(torch.randn(4, rank, 1, 1, dtype=torch.float64) * kernel)
        x = torch.randn(2, 4, 12, 16, dtype=torch.float64)
        y = conv(x)
        torch.testing.assert_close(y, conv.eval()(x))
        torch.testing.assert_close(y.norm(), x.norm())
        torch.testing.assert_close(conv.inverse(y), x)


def test_columns_with_good_pivots_and_a_bad_condition() -> None:
    L = torch.eye(24) - torch.ones(24, 24).tril(-1)
    linear = BROLinear(32, 32, rank=24)
    with torch.no_grad():
        linear.weight.copy_(torch.linalg.qr(torch.randn(32, 24)).Q @ L.mT)
    assert gram_factor(linear.weight) is None
    assert_orthogonal(dense_matrix(linear, (32,)).double(), atol=2e-6 * math.sqrt(32))
    wide = BROLinear(600, 30).eval()
    nn.init.ones_(wide.weight)
    assert_orthogonal(dense_matrix(wide, (600,)).double(), atol=2e-6 * math.sqrt(600))
