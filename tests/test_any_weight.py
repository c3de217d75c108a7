"""Orthogonal methods for weights of norm 1e-3 and 1e3, before and after training: singular values of the matrix."""

import math

import pytest
import torch
from torch import nn

from orthoconv import nn as layers
from orthoconv.testing import dense_matrix

CONVS = ["AOCConv2d", "BCOPConv2d", "BROConv2d", "LOTConv2d", "SOCConv2d", "ShiftConv2d"]
TRANSPOSED = [name.replace("Conv2d", "ConvTranspose2d") for name in CONVS]
LINEAR = ["BROLinear", "BjorckLinear", "CayleyLinear", "ExpLinear", "PolarLinear", "QRLinear"]
SHAPES = [(8, 8, 3, 5, {}), (2, 12, 3, 9, {}), (4, 16, 4, 6, {"stride": 2}), (8, 4, 3, 5, {"groups": 2})]
FLOATS = [torch.float64, torch.float32]


def with_norm(layer: nn.Module, norm: float) -> nn.Module:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.mul_(1 if "bias" in name else norm / parameter.norm())
    return layer


def train(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Steps of Adam that change weights of norm 1 a lot, and those of norm 1e-3 entirely."""
    optimizer, x = torch.optim.Adam(layer.parameters(), lr=0.1), torch.randn(4, *shape, dtype=dtype)
    target = torch.randn_like(layer(x))
    for _ in range(4):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()


def check(layer: nn.Module, shape: tuple[int, ...], channels: int, dtype: torch.dtype) -> None:
    before = dense_matrix(layer, shape).detach()
    train(layer, shape, dtype)
    after = dense_matrix(layer, shape).detach()
    assert torch.dist(before, after) > 1e-6, "it was trained"
    tolerance = 1e-10 if dtype == torch.float64 else 2e-6 * math.sqrt(channels)
    for matrix in (before, after):
        assert (torch.linalg.svdvals(matrix.double()) - 1).abs().max() <= tolerance


@pytest.mark.parametrize("norm", [1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers(name: str, dtype: torch.dtype, norm: float) -> None:
    for i, o in ((8, 8), (20, 6), (6, 20)):
        check(with_norm(getattr(layers, name)(i, o, dtype=dtype), norm), (i,), max(i, o), dtype)


@pytest.mark.parametrize("norm", [1e-3, 1e3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("name", "k"),
    [
        pytest.param(name, k, marks=[] if k == 2 and name in CONVS else [pytest.mark.slow])
        for name in CONVS + TRANSPOSED
        for k in range(len(SHAPES))
    ],
)
def test_convolutions(name: str, k: int, dtype: torch.dtype, norm: float) -> None:
    i, o, taps, n, options = SHAPES[k]
    s, transposed = options.get("stride", 1), name in TRANSPOSED
    channels = (o, i) if transposed else (i, o)
    layer = with_norm(getattr(layers, name)(*channels, taps, **options, dtype=dtype), norm)
    shape = (o, n // s, n // s) if transposed else (i, n, n)
    check(layer, shape, max(i * s * s, o), dtype)


@pytest.mark.parametrize("name", ["AOLConv2d", "RKOConv2d", "TaylorSOCConv2d", "FrobeniusConv2d"])
def test_the_check_finds_what_is_not_orthogonal(name: str) -> None:
    with pytest.raises(AssertionError):
        check(getattr(layers, name)(8, 8, 3, dtype=torch.float64), (8, 5, 5), 8, torch.float64)
