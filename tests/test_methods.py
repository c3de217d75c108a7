"""What is particular to each method beyond the contract."""

import math

import pytest
import torch
from oracles import conv_matrix, polar
from torch import Tensor

from orthoconv import fourier
from orthoconv.linalg import bjorck, bjorck_linear, nearest, norm_bound, polar_linear
from orthoconv.linalg import polar as formed_polar
from orthoconv.nn import BCOPConv2d, BjorckLinear, CircularConv2d, OSSNConv2d, PolarLinear, RKOConv2d, SVCMConv2d
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix, orthogonality_error

EPS = torch.finfo(torch.float64).eps


SPECTRA = [torch.logspace(0, -2.7, 130), torch.logspace(0, -4.5, 130), torch.arange(130.0) < 64]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Bjorck


@pytest.mark.parametrize("shape", [(6, 6), (9, 4), (4, 9), (1, 5), (3, 2, 7, 3)])
def test_bjorck_finds_the_nearest_orthogonal_matrix(shape) -> None:
    W = random(*shape)
    expected = torch.stack([polar(w) for w in W.reshape(-1, *shape[-2:])]).view(shape)
    torch.testing.assert_close(bjorck(W, 60), expected)
    torch.testing.assert_close(bjorck(1e-9 * W, 60), expected)


def test_bjorck_with_twenty_iterations_reaches_condition_number_500() -> None:
    U, V = polar(random(32, 32)), polar(random(32, 32))
    values = torch.logspace(0, -math.log10(500), 32, dtype=torch.float64)
    assert orthogonality_error(bjorck(3.0 * U * values @ V)) < 1e-5
    values[-1] = 1e-5
    assert orthogonality_error(bjorck(3.0 * U * values @ V)) > 0.1, "the negative control: too far to reach"


@pytest.mark.parametrize("shape", [(6, 6), (9, 6), (30, 6), (2, 9, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("iterations", [1, 2, 3, 7, 20])
def test_bjorck_by_eigenvalues_is_the_iteration(shape, dtype, iterations, monkeypatch) -> None:
    """Large matrices are treated so; converged or not, values and first and second derivatives are the same."""
    monkeypatch.setattr(nearest, "_EIGEN", 1)
    monkeypatch.setitem(nearest.DOUBLE, dtype, dtype)  # so that float64 takes the way of float32
    W, a, b = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    norm = torch.linalg.matrix_norm(W.detach(), 2)[..., None, None]
    found = []
    for Y in (bjorck(W, iterations), nearest._iterate(W / norm, iterations)):
        (slope,) = torch.autograd.grad(Y, W, a, create_graph=True)
        (plain,) = torch.autograd.grad(Y, W, a.detach(), retain_graph=True)
        (second,) = torch.autograd.grad(slope, W, b)
        found.append([Y, plain, slope, second])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 6), (9, 6), (6, 30)])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("iterations", [1, 7, 20])
def test_products_by_a_matrix_that_is_not_formed(shape, rows, iterations, monkeypatch) -> None:
    """Formed or not, values and first and second derivatives of x Q* are those of the iteration."""
    monkeypatch.setattr(nearest, "_EIGEN", 1)
    monkeypatch.setitem(nearest.DOUBLE, torch.float64, torch.float64)
    W, b = (random(*shape).requires_grad_() for _ in range(2))
    x, grad = random(rows, shape[1]).requires_grad_(), random(rows, shape[0]).requires_grad_()
    norm = torch.linalg.matrix_norm(W.detach(), 2)
    steps = nearest._iterate((W if shape[0] > shape[1] else W.mT) / norm, iterations)
    Q = steps if shape[0] > shape[1] else steps.mT
    pairs = [(bjorck_linear(x, W, iterations), x @ Q.mT), (polar_linear(x, W), x @ formed_polar(W).mT)]
    for pair in pairs:
        found = []
        for Y in pair:
            slopes = torch.autograd.grad(Y, (W, x), grad, create_graph=True)
            plain = torch.autograd.grad(Y, (W, x), grad.detach(), retain_graph=True)
            found.append([Y, *plain, *slopes, *torch.autograd.grad(slopes[0], (W, x, grad), b)])
        for ours, expected in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("layer", [BjorckLinear, PolarLinear])
@pytest.mark.parametrize("shape", [(130, 260), (260, 130), (200, 200)])
@pytest.mark.parametrize("condition", [1, 80, 5000])
def test_linear_layers_in_training_and_in_eval_mode(layer, shape, condition, monkeypatch) -> None:
    """The product that forms no matrix is that of the orthogonal matrix, and serves well-conditioned weights alone."""
    linear, k = layer(shape[1], shape[0]), min(shape)
    U, V = (torch.linalg.qr(random(n, k)).Q for n in shape)
    with torch.no_grad():
        linear.weight.copy_(5 * U * torch.logspace(0, -math.log10(condition), k, dtype=torch.float64) @ V.mT)
    roots, root = [], nearest._root_by_eigenvalues
    monkeypatch.setattr(nearest, "_root_by_eigenvalues", lambda *args: roots.append(args) or root(*args))
    Q = dense_matrix(linear.train(), (shape[1],)).double()
    x = torch.randn(9, shape[1])
    y = linear(x)
    assert bool(roots) == (condition < 1000)
    if condition < 1000 or layer is PolarLinear:  # 20 iterations of Bjorck do not bring all values to 1
        assert orthogonality_error(Q) < 2e-6 * math.sqrt(k)
    torch.testing.assert_close(linear.eval()(x), y, atol=1e-4, rtol=0)
    if condition < 1000:
        torch.testing.assert_close(y.double(), x.double() @ V @ U.mT + linear.bias.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("n", [8, 130])
def test_singular_square_weights_have_one_matrix(n: int) -> None:
    """Where rounding decides on the matrix, training and eval mode must not round differently."""
    linear, x = PolarLinear(n, n, bias=False), torch.randn(3, n)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(n, n // 2) @ torch.randn(n // 2, n))
    torch.testing.assert_close(linear.train()(x), linear.eval()(x))


@pytest.mark.parametrize("layer", [BjorckLinear, PolarLinear])
def test_an_operator_of_its_own_counts_in_training_mode(layer) -> None:
    class Half(layer):
        def operator(self, size, *sources):
            return sources[0] / 2

    x = torch.randn(3, 130)
    for linear in (Half(130, 130), layer(130, 130)):
        linear.operator = Half.operator.__get__(linear)
        assert torch.equal(linear.train()(x), x @ (linear.weight / 2).T + linear.bias)


def test_products_are_exact_under_autocast() -> None:
    W, x = torch.randn(256, 130), torch.randn(4, 130)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(polar_linear(x, W), polar_linear(x.double(), W.double()).float())


@pytest.mark.parametrize("values", SPECTRA)
@pytest.mark.parametrize("iterations", [20, 60])
@pytest.mark.parametrize("rows", [130, 200])
def test_bjorck_of_large_matrices_in_float32(values, iterations, rows) -> None:
    """Well conditioned or not, of full rank or not: what the iteration in float64 finds."""
    U, V = (torch.linalg.qr(random(n, 130)).Q for n in (rows, 130))
    W = (3 * U * values.double() @ V.mT).float().requires_grad_()
    grad = torch.randn(rows, 130)
    exact = W.detach().double().requires_grad_()
    expected = nearest._iterate(exact / norm_bound(exact.detach()), iterations)
    converged = values[-1] > 1e-3
    ours = bjorck(W, iterations)
    assert torch.linalg.svdvals(ours.detach().double()).max() < 1 + 1e-5
    (slope,), (true,) = torch.autograd.grad(ours, W, grad), torch.autograd.grad(expected, exact, grad.double())
    assert slope.isfinite().all()
    if converged or (iterations == 20 and values[-1] == 0):
        assert (ours - expected).abs().max() < 1e-4
        assert (slope - true).norm() < 1e-3 * true.norm()


def test_bjorck_never_expands() -> None:
    for scale in (1e-8, 1.0, 1e8):
        for iterations in (0, 1, 5, 20):
            assert torch.linalg.svdvals(bjorck(scale * random(8, 12, 7), iterations)).max() <= 1 + 100 * EPS


@pytest.mark.parametrize("shape", [(5, 64, 64), (300, 200), (7, 90), (4, 1, 1), (2, 3)])
def test_norm_bound_is_above_the_norm_and_near_it(shape) -> None:
    for W in (
        random(*shape),
        random(*shape[:-1], 1) * random(1, shape[-1]),
        1e150 * random(*shape),
        0 * random(*shape),
    ):
        norm, bound = torch.linalg.matrix_norm(W, ord=2), norm_bound(W)
        assert (bound >= norm * (1 - 100 * EPS)).all()
        assert (bound <= norm * min(shape[-2:]) ** (1 / 32) * (1 + 1e-9)).all()


def test_bjorck_linear() -> None:
    for i, o in ((3, 3), (5, 2), (2, 5)):
        layer = BjorckLinear(i, o, dtype=torch.float64)
        layer.weight.data.add_(0.3 * random(o, i))
        assert_orthogonal(layer, (i,), atol=1e-10)
        values = torch.linalg.svdvals(layer.cached_operator().detach())
        torch.testing.assert_close(layer.singular_values(), values)
        assert (values - 1).abs().max() < 1e-10
    with pytest.raises(ValueError, match="iterations must be a positive int, got 0"):
        BjorckLinear(3, 3, iterations=0)


# BCOP


@pytest.mark.parametrize("orthogonalizer", ["bjorck", "cayley"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, (2, 4)])
@pytest.mark.parametrize(("i", "o"), [(8, 8), (4, 10), (10, 4), (7, 7)])
def test_bcop_is_orthogonal_far_from_its_initialisation(orthogonalizer, k, i, o) -> None:
    layer = BCOPConv2d(i, o, k, orthogonalizer=orthogonalizer, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.5 * p.std().nan_to_num() * torch.randn_like(p))
    assert orthogonality_error(layer, (i, 5, 6)) < 1e-5
    assert (layer.singular_values((9, 8)) - 1).abs().max() < 1e-5


def test_bcop_has_no_more_taps_than_it_says() -> None:
    layer = BCOPConv2d(6, 6, 3, dtype=torch.float64)
    assert layer.kernel.shape == (6, 6, 3, 3)
    assert (layer.kernel.flatten(2).norm(dim=(0, 1)) > 1e-3).all(), "and it uses them all"


def test_bcop_projectors_have_half_the_rank() -> None:
    layer = BCOPConv2d(6, 7, 3)
    assert layer.projectors.shape == (1, 4, 7, 3)
    assert layer.weight.shape == (1, 6, 7)


# RKO


@pytest.mark.parametrize("orthogonalizer", ["bjorck", "cayley"])
@pytest.mark.parametrize("k", [1, 2, 3, (1, 4)])
@pytest.mark.parametrize(("i", "o"), [(3, 3), (2, 9), (9, 2), (1, 12)])
def test_rko_is_bounded_for_every_shape(orthogonalizer, k, i, o) -> None:
    layer = RKOConv2d(i, o, k, orthogonalizer=orthogonalizer, dtype=torch.float64)
    layer.weight.data.copy_(5 * random(*layer.weight.shape))
    assert_nonexpansive(layer, (i, 4, 5), atol=1e-12)
    assert_nonexpansive(layer, (i, 2, 2), atol=1e-12)


def test_rko_reaches_its_bound() -> None:
    """The division by sqrt(k k) is not too large: a box filter attains it."""
    layer = RKOConv2d(1, 1, 3, dtype=torch.float64)
    layer.weight.data.fill_(0.7)
    assert abs(layer.singular_values((6, 6)).max() - 1) < 1e-12


@pytest.mark.parametrize("layer", [BCOPConv2d, RKOConv2d])
def test_unknown_orthogonalizer(layer) -> None:
    with pytest.raises(ValueError, match="orthogonalizer must be one of 'bjorck', 'cayley', got 'qr'"):
        layer(3, 3, 3, orthogonalizer="qr")


# OSSN


@pytest.mark.parametrize(
    ("i", "o", "k", "n"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 32, 3, 32), (32, 64, 3, 16)]), (8, 8, 5, 7)],
)
def test_ossn_brings_large_kernels_near_norm_one(i, o, k, n) -> None:
    layer = OSSNConv2d(i, o, k)
    layer.weight.data.mul_(10)
    exact = float(fourier.singular_values(layer.weight.detach(), (n, n)).max())
    assert exact > 3
    norm = float(layer.singular_values((n, n)).max())
    assert 1 - 1e-5 <= norm < 1.05, "a power iterate is a lower bound, so the quotient is at least 1"
    precise = OSSNConv2d(i, o, k, iterations=1000)
    precise.load_state_dict(layer.state_dict())
    assert 1 - 1e-5 <= float(precise.singular_values((n, n)).max()) < min(norm + 1e-6, 1.002)


def test_ossn_leaves_small_kernels_alone() -> None:
    layer, plain = OSSNConv2d(3, 4, 3), CircularConv2d(3, 4, 3)
    layer.weight.data.mul_(0.1)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(layer(x), plain(x))


def test_ossn_differentiates_through_the_norm() -> None:
    """Scaling a kernel of norm above 1 changes nothing, so the gradient along the kernel is zero."""
    layer = OSSNConv2d(3, 4, 3, iterations=500, bias=False, dtype=torch.float64)
    layer.weight.data.mul_(10)
    (grad,) = torch.autograd.grad(layer(random(2, 3, 6, 6)).pow(2).sum(), layer.weight)
    assert abs((grad * layer.weight).sum()) < 1e-10 * grad.norm() * layer.weight.norm()


def test_ossn_has_no_state_beyond_its_parameters() -> None:
    layer = OSSNConv2d(3, 4, 3)
    assert set(layer.state_dict()) == {"weight", "bias"}
    x = torch.randn(1, 3, 8, 8)
    first = layer(x)
    layer(torch.randn(1, 3, 4, 4))
    assert torch.equal(layer(x), first)


# SVCM


@pytest.mark.parametrize(
    ("i", "o", "k", "s", "n"),
    [
        (3, 32, 3, 1, 32),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(32, 32, 4, 2, 16), (64, 64, 3, 2, 16)]),
    ],
)
def test_svcm_projections_converge(i, o, k, s, n) -> None:
    """What 50 iterations reach on shapes of KWLarge; docs/models.md has all of them."""
    layer = SVCMConv2d(i, o, k, stride=s)
    before = float((layer.singular_values((n, n)) - 1).abs().max())
    layer.project(50, size=(n, n))
    after = float((layer.singular_values((n, n)) - 1).abs().max())
    assert after < 3e-3 < 0.1 < before


def test_svcm_first_projection_is_the_nearest_point() -> None:
    """Against dense matrices: polar factor of the whole convolution, then the mean along each diagonal."""
    layer, size = SVCMConv2d(3, 3, 3, dtype=torch.float64), (4, 5)
    Q = polar(conv_matrix(layer.weight.detach(), size)).view(3, 4, 5, 3, 4, 5)
    expected = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    for p in range(3):
        for q in range(3):
            for a in range(4):
                for b in range(5):
                    expected[:, :, p, q] += Q[:, a, b, :, (a + p - 1) % 4, (b + q - 1) % 5] / 20
    layer.project(1, size=size)
    torch.testing.assert_close(layer.weight.detach(), expected)


def test_svcm_clip_leaves_small_values() -> None:
    layer = SVCMConv2d(4, 4, 3, mode="clip", dtype=torch.float64)
    layer.weight.data.mul_(0.1)
    before = layer.weight.detach().clone()
    layer.project(3, size=(6, 6))
    torch.testing.assert_close(layer.weight.detach(), before)
    layer.weight.data.mul_(100)
    layer.project(100, size=(6, 6))
    assert layer.singular_values((6, 6)).max() < 1.001
    assert layer.singular_values((6, 6)).min() < 0.9, "clipped, not orthogonal"


def test_svcm_uses_the_size_of_the_last_image() -> None:
    layer = SVCMConv2d(2, 2, 3)
    with pytest.raises(ValueError, match=r"pass size=\(h, w\)"):
        layer.project()
    twin = SVCMConv2d(2, 2, 3)
    twin.load_state_dict(layer.state_dict())
    layer(torch.randn(1, 2, 6, 5))
    layer.project(2)
    twin.project(2, size=(6, 5))
    assert torch.equal(layer.weight, twin.weight)
    with pytest.raises(ValueError, match=r"mode must be .* got 'soft'"):
        SVCMConv2d(2, 2, 3, mode="soft")


def test_nearest_kernel_when_taps_wrap() -> None:
    weight, size = random(2, 3, 5, 3), (3, 4)
    D = fourier.spectrum(weight, size, dilation=2)
    again = fourier.nearest_kernel(D, size, (5, 3), dilation=2)
    torch.testing.assert_close(fourier.spectrum(again, size, dilation=2), D)
