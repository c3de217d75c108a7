"""Orthogonality of large layers in practice (Section 5.3), in float32 as they train and in float64."""

import math

import pytest
import torch
from torch import Tensor

from orthoconv.nn import CayleyConv2d
from orthoconv.testing import norm_ratios


def train(layer: CayleyConv2d, n: int, steps: int) -> None:
    """Steps of Adam, large enough to move the layer far from where it started."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    x = torch.randn(4, layer.in_channels, n, n)
    target = torch.randn_like(layer(x))
    for _ in range(steps):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("i", "o", "n", "steps"),
    [
        (3, 64, 16, 20),
        pytest.param(64, 128, 8, 100, marks=pytest.mark.slow),
        pytest.param(128, 128, 4, 100, marks=pytest.mark.slow),
        pytest.param(512, 512, 4, 20, marks=pytest.mark.slow),
    ],
)
def test_norms_are_kept_before_and_after_learning(i: int, o: int, n: int, steps: int) -> None:
    layer = CayleyConv2d(i, o, 3)
    for _ in range(2):
        assert (norm_ratios(layer, torch.randn(16, i, n, n)) - 1).abs().max() < 1e-5
        assert (layer.singular_values((n, n)) - 1).abs().max() < 2e-6 * math.sqrt(o)
        before = layer.weight.detach().clone()
        train(layer, n, steps)
        assert torch.dist(layer.weight, before) > 0.1 * before.norm()


def test_fewer_channels_never_expand() -> None:
    layer = CayleyConv2d(128, 64, 3)
    for _ in range(2):
        ratios = norm_ratios(layer, torch.randn(16, 128, 8, 8))
        assert ratios.max() < 1 + 1e-5
        assert ratios.max() < 0.9, "random images lose about half of their energy"
        assert layer.singular_values((8, 8)).max() < 1 + 2e-6 * math.sqrt(128)
        train(layer, 8, steps=15)


def gram_deviation(D: Tensor) -> float:
    """Bound on the distance of the singular values of the matrices (f, n, n) from 1."""
    eye = torch.eye(D.shape[-1], dtype=D.dtype)
    return float(torch.linalg.matrix_norm(D.mH @ D - eye).max())


@pytest.mark.slow
def test_512_channels_in_float64() -> None:
    layer = CayleyConv2d(512, 512, 3, bias=False, dtype=torch.float64).requires_grad_(False)
    assert gram_deviation(layer.spectrum((8, 8))[0]) < 1e-12
    x = torch.randn(2, 512, 8, 8, dtype=torch.float64)
    assert (norm_ratios(layer, x) - 1).abs().max() < 1e-13
    y, pull = torch.func.vjp(layer, x)
    torch.testing.assert_close(pull(y)[0], x, atol=1e-12, rtol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e3, 1e4])
def test_extreme_weights(scale: float) -> None:
    layer = CayleyConv2d(6, 8, 3)
    with torch.no_grad():
        layer.g.fill_(scale)
    assert (layer.singular_values((5, 6)) - 1).abs().max() < 1e-4
    layer(torch.randn(2, 6, 5, 6)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_zero_weights_are_the_identity() -> None:
    layer = CayleyConv2d(4, 4, 3, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    x = torch.randn(2, 4, 5, 6)
    y = layer(x)
    torch.testing.assert_close(y, x)
    y.sum().backward()
    assert layer.weight.grad.isfinite().all()
