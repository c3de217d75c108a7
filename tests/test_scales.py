"""Bounds and radii at every scale: weights and inputs near the ends of the range of floating point."""

import math

import pytest
import torch
from torch import Tensor, nn

from orthoconv import certified_radius, lipschitz_bound, rounding_bound
from orthoconv.certificates import pairwise_radius
from orthoconv.linalg import frobenius_norm, row_norms, spectral_norm
from orthoconv.nn import ConvexResidual, L2Pool2d, Normalize, Scale

SCALES = [1e-310, 1e-300, 1e-200, 1e-160, 1.0, 1e160, 1e300]


def loaded(std: list[float]) -> Normalize:
    layer = Normalize([0.5] * len(std))
    layer.load_state_dict({"mean": layer.mean, "std": torch.tensor(std)})
    return layer


@pytest.mark.parametrize("std", [[-5.0], [-0.01, 5.0], [0.0, 1.0], [math.nan]])
def test_normalize_refuses_the_std_of_a_state_dict_that_is_not_positive(std: list[float]) -> None:
    with pytest.raises(ValueError, match=r"standard deviations that are positive, got \["):
        lipschitz_bound(loaded(std), (len(std), 4, 4))
    assert lipschitz_bound(loaded([0.5] * len(std)), (len(std), 4, 4)) == 2


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_norms_at_every_scale(scale: float, dtype: torch.dtype) -> None:
    A = torch.randn(3, 5, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.matrix_norm(A, ord=2).max().item() * scale
    assert exact <= spectral_norm(A * scale) <= exact * (1 + 1e-12) + 1e-306
    assert spectral_norm(A * 0) == 0
    if not A.is_complex():
        assert frobenius_norm(A * scale) == pytest.approx(frobenius_norm(A) * scale, rel=1e-12)
        norms = row_norms(A * scale)
        torch.testing.assert_close(norms / scale, A.flatten(1).norm(dim=1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(4, 6, bias=False), (4,)), (nn.Conv2d(2, 3, 3, padding=1, bias=False), (2, 5, 5))]
)
def test_the_bound_of_tiny_and_huge_weights(layer: nn.Module, shape: tuple[int, ...], scale: float) -> None:
    layer = layer.double()
    unit, weight = lipschitz_bound(layer, shape), layer.weight.detach().clone()
    layer.weight.data = weight * scale
    try:
        assert unit * scale * (1 - 1e-12) <= lipschitz_bound(layer, shape) <= unit * scale * (1 + 1e-12) + 1e-306
    finally:
        layer.weight.data = weight


def test_norms_that_are_not_finite_are_refused() -> None:
    layer = nn.Linear(2, 2)
    for bad in (math.inf, math.nan):
        nn.init.constant_(layer.weight, bad)
        with pytest.raises(ValueError, match="is its weight finite"):
            lipschitz_bound(layer, (2,))


def test_norms_have_gradients_at_every_scale() -> None:
    def gradient(x: Tensor) -> Tensor:
        x.requires_grad_()
        return torch.autograd.grad(row_norms(x).sum(), x)[0]

    x = torch.tensor([[3.0, 4.0]])
    for scale in (1.0, 1e-30, 1e30):
        torch.testing.assert_close(gradient(x * scale), x / 5)
    assert torch.equal(gradient(torch.zeros(1, 2)), torch.zeros(1, 2))


def test_rounding_includes_underflow() -> None:
    """In float32 products of 1e-25 by 1e-25 are 0, and what is lost counts."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = 1e-25 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    x = torch.full((1, 4), 1e-20)
    error = row_norms(layer(x).double() - x.double() @ layer.weight.double().T).item()
    assert 0 < error <= rounding_bound(layer, (4,), row_norms(x).item()) < 1e-20
    half = ConvexResidual(nn.Identity())
    x = torch.full((1, 3), 2.0**-149)
    error = row_norms(half(x).double() - x.double()).item()
    assert 0 < error <= rounding_bound(half, (3,), row_norms(x.double()).item())


def test_the_bound_of_many_small_layers_is_not_0() -> None:
    assert lipschitz_bound(nn.Sequential(Scale(1e-200), Scale(1e-200)).double(), (3,)) > 0
    assert lipschitz_bound(nn.Sequential(Scale(1e-200), Scale(0.0)).double(), (3,)) == 0


def test_radii_are_rounded_down() -> None:
    logits = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    labels = logits.argmax(1)
    distances = torch.full((3, 3), 2.0, dtype=torch.float64).sqrt().fill_diagonal_(0)
    for L in (1.0, 1 / 3):
        top = logits.double().topk(2).values
        exact = (top[:, 0] - top[:, 1]) / math.sqrt(2) / L
        for radius in (certified_radius(logits, labels, L), pairwise_radius(logits, labels, distances, L)):
            assert (radius.double() <= exact).all()
            torch.testing.assert_close(radius.double(), exact, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("bad", [[math.inf, 0.0], [0.0, -math.inf], [math.inf, math.inf], [math.nan, 0.0]])
def test_logits_that_are_not_finite_certify_nothing(bad: list[float]) -> None:
    logits, labels = torch.tensor([bad, [1.0, 0.0]]), torch.tensor([0, 0])
    distances = 1 - torch.eye(2)
    for radius in (certified_radius(logits, labels), pairwise_radius(logits, labels, distances)):
        assert radius[0] == 0
        assert 0 < radius[1] < math.inf


def test_radii_do_not_overflow() -> None:
    logits, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([0])
    assert certified_radius(logits, labels, 1e-310).isfinite().all()
    assert pairwise_radius(logits, labels, 1e-200 * (1 - torch.eye(2, dtype=torch.float64)), 1e-200).isfinite().all()


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-24, 1e-20, 1e18, 1e30])
def test_norms_of_blocks_at_every_scale(size: float) -> None:
    """The squares of entries of 1e-24 are 0 in float32, and those of 1e30 infinite."""
    layer, x = L2Pool2d(2), torch.randn(3, 2, 4, 4, dtype=torch.float64).mul(size).float()
    exact = x.double().unflatten(-1, (2, 2)).unflatten(-3, (2, 2)).norm(dim=(-3, -1))
    error = row_norms(layer(x).double() - exact)
    for k, norm in enumerate(row_norms(x.double()).tolist()):
        assert error[k] <= rounding_bound(layer, (2, 4, 4), norm)
    assert torch.equal(layer(torch.zeros(1, 2, 4, 4)), torch.zeros(1, 2, 2, 2))
