"""What each of the small parts computes, and the rules of residuals and of modules that are made of others."""

import math

import pytest
import torch
from torch import Tensor, nn

from orthoconv import in_double, lipschitz_bound
from orthoconv.certificates import growth
from orthoconv.nn import (
    Abs,
    BatchCentering,
    ChannelShuffle,
    Combination,
    ConcatResidual,
    ConvexResidual,
    FullSort,
    GroupSort,
    HouseHolder,
    InvertibleDownsample,
    InvertibleUpsample,
    L2Pool2d,
    LPReLU,
    MaxMin,
    NActivation,
    PrescaledResidual,
    Scale,
    ScaledAdaptiveAvgPool2d,
    ScaledAvgPool2d,
    SoftHuber,
)
from orthoconv.testing import assert_orthogonal, dense_matrix

# What each computes


def test_householder_sorts_at_the_start_and_reflects_later() -> None:
    x = torch.randn(50, 6, 2, 2, dtype=torch.float64)
    larger, smaller = MaxMin()(x).chunk(2, 1)
    layer = HouseHolder(6).double()
    layer.angle.data.fill_(math.pi / 2)
    torch.testing.assert_close(layer(x), torch.cat((smaller, larger), 1))
    nn.init.normal_(layer.angle)
    (a, b), t = x.chunk(2, 1), layer.angle.view(-1, 1, 1)
    beyond = a * (t / 2).sin() > b * (t / 2).cos()
    first = torch.where(beyond, a * t.cos() + b * t.sin(), a)
    second = torch.where(beyond, a * t.sin() - b * t.cos(), b)
    torch.testing.assert_close(layer(x), torch.cat((first, second), 1))
    assert 0.2 < beyond.double().mean() < 0.8
    torch.testing.assert_close(layer(x).norm(), x.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_maxmin_is_moved_bit_by_bit(dtype: torch.dtype, layout: torch.memory_format) -> None:
    """As torch.where moves it: to where the value came from, the first channel at ties; also numbers such as NaN."""
    x = torch.randint(-2, 3, (3, 4, 5, 6)).to(dtype).contiguous(memory_format=layout).requires_grad_()
    grad = torch.randn(3, 4, 5, 6).to(dtype).contiguous(memory_format=layout)
    grad[0, :, 0, :5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, torch.finfo(dtype).tiny])
    (found,) = torch.autograd.grad(MaxMin()(x), x, grad)
    (a, b), (larger, smaller) = x.detach().chunk(2, 1), grad.chunk(2, 1)
    expected = torch.cat((larger.where(a >= b, smaller), smaller.where(a >= b, larger)), 1)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(found.view(bits), expected.view(bits))
    assert not torch.equal(found.view(bits), grad.view(bits))


def test_the_gradient_of_maxmin_may_be_the_negative_of_a_tensor() -> None:
    """The imaginary part of a conjugate is a view with a bit that says so."""
    x = torch.randn(3, 4, requires_grad=True)
    (found,) = torch.autograd.grad(torch.complex(x, MaxMin()(x)).conj().imag.sum(), x)
    torch.testing.assert_close(found, -torch.ones(3, 4))


def test_n_activation_has_three_slopes() -> None:
    layer = NActivation(1).double()
    layer.corners.data.copy_(torch.tensor([[2.0], [-1.0]]))  # in either order
    x = torch.tensor([[-3.0], [-1.0], [0.5], [2.0], [5.0]], dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.tensor([[-1.0], [1.0], [-0.5], [-2.0], [1.0]], dtype=torch.float64))
    start, x = NActivation(4, reach=9.0), torch.randn(20, 4)
    torch.testing.assert_close(start(x), torch.stack((x[:, 0].abs(), x[:, 1], x[:, 2].abs(), x[:, 3]), 1))


def test_abs_and_full_sort() -> None:
    x = torch.randn(4, 6, 3, 3)
    assert torch.equal(Abs()(x), x.abs())
    assert torch.equal(Abs(0.5)(x), torch.cat((x[:, :3].abs(), x[:, 3:]), 1))
    assert torch.equal(Abs(0.0)(x), x)
    assert torch.equal(FullSort()(x), GroupSort(6)(x))
    R = torch.tensor([[1.0, -1.0], [1.0, 1.0]]) / math.sqrt(2)
    v = torch.randn(20, 2)
    torch.testing.assert_close(Abs(0.5)(v @ R.mT) @ R, MaxMin()(v)[:, [0, 1]])
    zeros = torch.zeros(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(Abs()(zeros).sum(), zeros)
    assert (grad.abs() == 1).all(), "the norm of gradients is kept at 0"


def test_slopes_beyond_one_are_clipped() -> None:
    layer, x = LPReLU(2), torch.tensor([[-2.0, -2.0], [1.0, 1.0]])
    layer.slope.data.copy_(torch.tensor([5.0, -5.0]))
    assert torch.equal(layer(x), torch.tensor([[-2.0, 2.0], [1.0, 1.0]]))
    layer.slope.data.fill_(0.25)
    assert torch.equal(layer(x), nn.functional.prelu(x, torch.tensor([0.25])))


def test_soft_huber_is_smooth_and_exact_near_zero() -> None:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(SoftHuber(0.5)(x), (x * x + 0.25).sqrt() - 0.5)
    tiny = torch.tensor([1e-6])
    assert SoftHuber(1.0)(tiny).item() == pytest.approx(5e-13, rel=1e-6)
    assert ((tiny * tiny + 1).sqrt() - 1).item() == 0, "the negative control: the plain formula loses all digits"


def test_pools() -> None:
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(L2Pool2d(2)(x), nn.functional.lp_pool2d(x, 2.0, 2))
    torch.testing.assert_close(L2Pool2d()(x), x.flatten(2).norm(dim=2)[..., None, None])
    torch.testing.assert_close(L2Pool2d((2, 3))(x).norm(), x.norm())
    assert torch.equal(ScaledAdaptiveAvgPool2d((2, 3))(x), ScaledAvgPool2d(2)(x))
    torch.testing.assert_close(ScaledAdaptiveAvgPool2d(1)(x), x.mean((2, 3), keepdim=True) * math.sqrt(24))
    zeros = torch.zeros(1, 2, 4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(L2Pool2d(2)(zeros).sum(), zeros)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_shuffles_and_their_inverses() -> None:
    x = torch.randn(2, 12, 4, 6)
    for layer in (ChannelShuffle(3), InvertibleUpsample(2), InvertibleDownsample(2)):
        assert torch.equal(layer.inverse(layer(x)), x)
        assert_orthogonal(layer, (12, 2, 2))
    assert torch.equal(InvertibleUpsample(2)(x), InvertibleDownsample(2).inverse(x))
    assert torch.equal(InvertibleUpsample(2)(x), nn.functional.pixel_shuffle(x, 2))


def test_batch_centering_learns_the_mean() -> None:
    layer, x = BatchCentering(3, momentum=0.25).double(), torch.randn(8, 3, 4, 4, dtype=torch.float64) + 5
    y = layer(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, 0.25 * x.mean((0, 2, 3)))
    before = layer.running_mean.clone()
    with pytest.raises(TypeError, match=r"BatchCentering is bounded in eval mode only; call model.eval\(\)"):
        lipschitz_bound(nn.Sequential(layer), (3, 4, 4))
    assert torch.equal(layer.running_mean, before), "asking for a bound trains nothing"
    layer.eval()
    nn.init.normal_(layer.bias)
    expected = x - layer.running_mean[:, None, None] + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), expected)
    assert torch.equal(layer.running_mean, before)
    assert BatchCentering(3)(torch.randn(5, 3)).shape == (5, 3)


# Residuals, and the rule for modules that are made of others


def test_residuals_compute_what_they_say() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    f = nn.Linear(4, 4).double()
    layer = PrescaledResidual(f).double()
    torch.testing.assert_close(layer(x), (x + f(x)) / 2)
    layer.alpha.data.fill_(-3.0)
    torch.testing.assert_close(layer(x), (x + f(-3 * x)) / 4)
    half = nn.Linear(2, 5).double()
    torch.testing.assert_close(ConcatResidual(half)(x), torch.cat((x[:, :2], half(x[:, 2:])), 1))


@pytest.mark.parametrize("alpha", [-2.0, 0.0, 0.5, 1e4])
def test_bounds_of_residuals(alpha: float) -> None:
    """Linear branches, where the norm of the whole is known."""
    layer = PrescaledResidual(Scale(3.0)).double().eval()
    layer.alpha.data.fill_(alpha)
    assert lipschitz_bound(layer, (2,)) == pytest.approx((1 + 3 * abs(alpha)) / (1 + abs(alpha)))
    if alpha >= 0:
        norm = torch.linalg.matrix_norm(dense_matrix(layer, (2,)), 2).item()
        assert lipschitz_bound(layer, (2,)) == pytest.approx(norm)
    for factor in (0.5, 3.0):
        assert lipschitz_bound(ConcatResidual(Scale(factor)), (4, 2, 2)) == max(1, factor)
    nested = nn.Sequential(Scale(2.0), ConcatResidual(nn.Sequential(ConcatResidual(Scale(5.0)), Scale(0.1))))
    assert lipschitz_bound(nested, (4,)) == pytest.approx(2.0)


@torch.no_grad()
def test_rounding_of_residuals_with_constants() -> None:
    inner = nn.Linear(8, 8)
    nn.init.constant_(inner.bias, 1e3)
    for model in (PrescaledResidual(inner), nn.Sequential(nn.Linear(8, 16), ConcatResidual(inner))):
        for alpha in (0.3, -7.0):
            if isinstance(model, PrescaledResidual):
                model.alpha.fill_(alpha)
            x = torch.randn(200, 8)
            error = (model(x).double() - in_double(model)(x.double())).norm(dim=1)
            assert (error <= growth(model, (8,)).error(x.norm(dim=1).double())).all()
            assert error.max() > 0


class Doubled(PrescaledResidual):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Mine(Combination):
    """Someone's combination, which answers for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.f = Scale(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x) + self.f(x)

    def growth(self, x, child):
        return child("f", self.f, x) + child("f", self.f, x)


def test_combinations_answer_for_themselves() -> None:
    assert lipschitz_bound(nn.Sequential(Mine()), (3,)) == 6
    with pytest.raises(TypeError, match=r"no rule for .*Doubled, at Sequential\.0"):
        lipschitz_bound(nn.Sequential(Doubled(nn.Identity())), (3,))
    with pytest.raises(TypeError, match=r"no rule for .*GELU, at ConcatResidual\.f"):
        lipschitz_bound(ConcatResidual(nn.GELU()), (4,))
    broken = ConvexResidual(nn.ReLU())
    broken.alpha.data.fill_(math.nan)
    with pytest.raises(ValueError, match=r"Lipschitz bound of ConvexResidual \(ConvexResidual\) is nan"):
        lipschitz_bound(broken, (4,))
    late = ConcatResidual(nn.ReLU())
    late.f.inplace = True
    with pytest.raises(TypeError, match="nothing inside works in place"):
        lipschitz_bound(late, (4,))
