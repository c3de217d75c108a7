"""Activations, downsampling, pooling, residuals, normalisation: what they compute and what they keep."""

import pytest
import torch
from torch import Tensor, nn

from orthoconv.nn import ConvexResidual, GroupSort, InvertibleDownsample, MaxMin, Normalize, Scale, ScaledAvgPool2d
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 6), (2, 6, 2, 3), (6,)])
@pytest.mark.parametrize("layer", [MaxMin(), GroupSort(2), GroupSort(3), GroupSort(6), GroupSort(1)], ids=str)
def test_sorting_permutes_values_and_gradients(layer, shape) -> None:
    x = random(*shape).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y.flatten().sort().values, x.flatten().sort().values)
    g = random(*shape)
    (grad,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(grad.flatten().sort().values, g.flatten().sort().values)
    torch.autograd.gradcheck(layer, x)
    torch.autograd.gradgradcheck(layer, x)


def test_maxmin_is_groupsort_of_two() -> None:
    x = random(4, 6, 3, 3)
    assert torch.equal(MaxMin()(x), GroupSort(2)(x))
    larger, smaller = MaxMin()(x).chunk(2, 1)
    assert (larger >= smaller).all()
    assert torch.equal(larger, torch.maximum(*x.chunk(2, 1)))


def test_ties_keep_the_norm_of_gradients() -> None:
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    g = random(2, 4)
    (grad,) = torch.autograd.grad(MaxMin()(x), x, g)
    torch.testing.assert_close(grad.norm(), g.norm())
    (split,) = torch.autograd.grad(torch.maximum(*x.chunk(2, 1)), x, g[:, :2])
    assert split.norm() < 0.8 * g[:, :2].norm(), "the negative control: torch.maximum halves them"


def test_sorting_is_one_lipschitz() -> None:
    for layer in (MaxMin(), GroupSort(3)):
        x, y = random(500, 6), random(500, 6)
        assert ((layer(x) - layer(y)).flatten(1).norm(dim=1) <= (x - y).flatten(1).norm(dim=1) + 1e-12).all()


@pytest.mark.parametrize("layer", [MaxMin(), GroupSort(4)])
def test_sorting_refuses_other_channels(layer) -> None:
    with pytest.raises(ValueError, match=r"divides, got shape \(2, 3, 4, 4\)"):
        layer(torch.zeros(2, 3, 4, 4))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_sorting_under_vmap_and_compile() -> None:
    x = random(3, 4, 2, 2)
    torch.testing.assert_close(torch.func.vmap(lambda image: MaxMin()(image[None])[0])(x), MaxMin()(x))
    compiled = torch.compile(MaxMin(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), MaxMin()(x))


@pytest.mark.parametrize("s", [1, 2, 3])
def test_invertible_downsample(s) -> None:
    layer, x = InvertibleDownsample(s), torch.randn(2, 3, 6, 12)
    assert torch.equal(layer.inverse(layer(x)), x)
    assert torch.equal(layer(x), nn.functional.pixel_unshuffle(x, s))
    assert_orthogonal(layer, (2, 6, 6))
    with pytest.raises(ValueError, match=r"got \(1, 1, 5, 7\)"):
        InvertibleDownsample(2)(torch.zeros(1, 1, 5, 7))


@pytest.mark.parametrize("k", [1, 2, 3, (1, 2)])
def test_scaled_pooling_has_norm_one(k) -> None:
    layer = ScaledAvgPool2d(k)
    assert_nonexpansive(layer, (2, 6, 6))
    values = torch.linalg.svdvals(dense_matrix(layer, (2, 6, 6), dtype=torch.float64))
    torch.testing.assert_close(values, torch.ones_like(values))
    with pytest.raises(ValueError, match=r"divide, got \(5, 7\)"):
        ScaledAvgPool2d(2)(torch.zeros(1, 1, 5, 7))


def test_convex_residual() -> None:
    f = nn.Linear(3, 3).double()
    layer, x = ConvexResidual(f).double(), random(2, 3)
    torch.testing.assert_close(layer(x), 0.5 * f(x) + 0.5 * x)
    layer.alpha.data.fill_(100.0)
    torch.testing.assert_close(layer(x), f(x))
    layer.alpha.data.fill_(-100.0)
    torch.testing.assert_close(layer(x), x)
    layer(x).sum().backward()
    assert layer.alpha.grad is not None


def test_normalize() -> None:
    x = torch.rand(2, 3, 4, 4)
    mean, std = [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]
    expected = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(Normalize(mean, std)(x), expected)
    torch.testing.assert_close(Normalize(mean)(x), expected * torch.tensor(std)[:, None, None])
    for bad in (
        lambda: Normalize([0.5], [0.0]),
        lambda: Normalize([0.5], [-1.0]),
        lambda: Normalize([0.5], [0.1, 0.2]),
    ):
        with pytest.raises(ValueError, match="Normalize takes"):
            bad()
    with pytest.raises(ValueError, match=r"3 channels, got shape \(1, 1, 2, 2\)"):
        Normalize(mean)(torch.zeros(1, 1, 2, 2))


def test_scale() -> None:
    assert Scale(2)(torch.ones(1)).item() == 2
    with pytest.raises(ValueError, match="finite, got nan"):
        Scale(float("nan"))


def test_sorting_asks_for_the_channels_of_three_axes() -> None:
    """One image (c, h, w) and a batch of sequences (b, c, n) look the same."""
    x = random(4, 3, 2)
    for layer in (MaxMin, lambda **options: GroupSort(2, **options)):
        with pytest.raises(ValueError, match=r"needs dim= .* \(4, 3, 2\)"):
            layer()(x)
        assert torch.equal(layer(dim=-3)(x), layer()(x[None])[0])


def test_residual_under_autocast() -> None:
    layer = ConvexResidual(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 4)).shape == (2, 4)


def test_normalize_takes_sequences() -> None:
    with pytest.raises(ValueError, match="takes sequences"):
        Normalize(0.5, 0.2)
