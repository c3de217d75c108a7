"""Layers that start as the identity, or as near to it as their method comes."""

import inspect
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from oracles import downsample_matrix
from torch import Tensor, nn

from orthoconv import nn as layers
from orthoconv.linalg import cayley, cayley_preimage
from orthoconv.nn import (
    AOCConv2d,
    AOLConv2d,
    AOLLinear,
    BCOPConv2d,
    BCOPConvTranspose2d,
    BjorckLinear,
    BROLinear,
    CayleyConv2d,
    CayleyLinear,
    CircularConv2d,
    ExpLinear,
    FrobeniusLinear,
    LiResConv2d,
    LiResConvTranspose2d,
    LOTConv2d,
    OSSNConv2d,
    PolarLinear,
    QRLinear,
    RKOConv2d,
    ShiftConv2d,
    SOCConv2d,
    SVCMConv2d,
)
from orthoconv.testing import assert_orthogonal, dense_matrix


def rectangle(o: int, i: int, *, turns: bool) -> Tensor:
    """Output j has input j; with turns also the inputs j + o, j + 2 o, ..., all divided by the root of their number."""
    T = torch.zeros(o, i, dtype=torch.float64)
    for j in range(i):
        if turns or j < o:
            T[j % o, j] = 1
    return T / T.norm(dim=1, keepdim=True).clamp_min(1)


CONVS = [AOCConv2d, AOLConv2d, BCOPConv2d, CayleyConv2d, LOTConv2d, OSSNConv2d, RKOConv2d, SOCConv2d]


@pytest.mark.parametrize("kind", CONVS)
@pytest.mark.parametrize(("i", "o", "stride"), [(4, 4, 1), (2, 4, 1), (4, 2, 1), (2, 8, 2), (1, 8, 2), (4, 4, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(kind: type, i: int, o: int, stride: int, groups: int) -> None:
    k = (4 if kind is AOCConv2d else 6) if stride == 2 else 3  # three taps on blocks, or as many as AOC has
    layer = kind(groups * i, groups * o, k, stride=stride, groups=groups, identity=True, dtype=torch.float64)
    inputs = i * stride**2
    T = rectangle(o, inputs, turns=kind not in (CayleyConv2d, SOCConv2d))
    if kind is RKOConv2d:
        T = T / 3
    matrix = dense_matrix(layer, (groups * i, 4, 6)) @ downsample_matrix(groups * i, (4, 6), (stride, stride)).mT
    n = 24 // stride**2
    matrix = matrix.view(groups, o, n, groups, inputs, n)
    for g in range(groups):
        expected = torch.einsum("oi,pq->opiq", T, torch.eye(n, dtype=torch.float64))
        own = slice(0, min(o, inputs) if kind is RKOConv2d else o)  # beyond its inputs RKO is random
        assert torch.dist(matrix[g, own, :, g], expected[own]) < 1e-6


@pytest.mark.parametrize("kind", [CircularConv2d, SVCMConv2d])
def test_unconstrained_kernels(kind: type) -> None:
    layer = kind(4, 4, 3, bias=False, identity=True)
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(layer(x), x)


@pytest.mark.parametrize("orthogonalizer", ["bjorck", "cayley"])
def test_orthogonalizers(orthogonalizer: str) -> None:
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    options = {"orthogonalizer": orthogonalizer, "bias": False, "identity": True, "dtype": torch.float64}
    for k in (1, 3, 5):
        torch.testing.assert_close(BCOPConv2d(4, 4, k, **options)(x), x, atol=1e-10, rtol=0)
        torch.testing.assert_close(BCOPConvTranspose2d(4, 4, k, **options)(x), x, atol=1e-10, rtol=0)
        torch.testing.assert_close(RKOConv2d(4, 4, k, **options)(x), x / k, atol=1e-10, rtol=0)
    wide = RKOConv2d(2, 6, 3, **options)
    rows = wide.kernel.detach().flatten(1)
    assert_orthogonal(3 * rows, atol=1e-10)


@pytest.mark.parametrize("kind", [AOCConv2d, BCOPConv2d])
@pytest.mark.parametrize(("c", "k"), [(4, 2), (4, 4), (3, 3), (5, 3)])
def test_what_cannot_be_the_identity_is_a_shift_of_channels(kind: type, c: int, k: int) -> None:
    """Even kernels and odd numbers of channels: one tap in each channel, at most one pixel off the centre."""
    kernel = kind(c, c, k, identity=True, dtype=torch.float64).kernel.detach()
    where = kernel.abs().sum(1).flatten(1) > 0.5
    assert torch.equal(where.sum(1), torch.ones(c, dtype=torch.long))
    taps = where.int().argmax(1)
    assert max((taps // k - (k - 1) // 2).abs().max(), (taps % k - (k - 1) // 2).abs().max()) <= 1
    torch.testing.assert_close(kernel.sum((2, 3)), torch.eye(c, dtype=torch.float64), atol=1e-9, rtol=0)


def test_signs_stay() -> None:
    layer = CayleyConv2d(3, 3, 3, signs=[1, -1, 1], bias=False, identity=True)
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(layer(x), x * torch.tensor([1.0, -1.0, 1.0])[:, None, None])


def test_shifts_start_as_shifts() -> None:
    layer = ShiftConv2d(8, 8, 3, bias=False, identity=True, dtype=torch.float64)
    x = torch.randn(2, 8, 5, 6, dtype=torch.float64)
    moves = [(1, 0), (-1, 0), (0, 1), (0, -1), *[(0, 0)] * 4]
    expected = torch.stack([x[:, c].roll(by, (-2, -1)) for c, by in enumerate(moves)], 1)
    torch.testing.assert_close(layer(x), expected)


LINEARS: list[tuple[Callable[..., nn.Module], bool]] = [
    (PolarLinear, True),
    (BjorckLinear, True),
    (QRLinear, True),
    (AOLLinear, True),
    (CayleyLinear, False),
    (ExpLinear, False),
]


@pytest.mark.parametrize(("kind", "turns"), LINEARS)
@pytest.mark.parametrize(("i", "o"), [(4, 4), (3, 5), (6, 3)])
def test_linear_layers(kind: Callable[..., nn.Module], turns: bool, i: int, o: int) -> None:
    layer = kind(i, o, identity=True, dtype=torch.float64)
    assert torch.dist(dense_matrix(layer, (i,)), rectangle(o, i, turns=turns)) < 1e-6


def test_reflections_start_as_signs() -> None:
    layer = BROLinear(6, 4, rank=2, identity=True, dtype=torch.float64)
    signs = torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(dense_matrix(layer, (6,)), signs.diag()[:4])


def test_frobenius_starts_as_a_multiple() -> None:
    layer = FrobeniusLinear(4, 4, identity=True, dtype=torch.float64)
    torch.testing.assert_close(dense_matrix(layer, (4,)), torch.eye(4, dtype=torch.float64) / 2)


MOVING = [(kind, (4, 4, 3), (4, 5, 6)) for kind in (*CONVS, ShiftConv2d)] + [
    (kind, (4, 4), (4,)) for kind, _ in LINEARS
]


@pytest.mark.parametrize(("kind", "arguments", "shape"), MOVING)
def test_gradients_are_finite_and_not_zero_and_training_moves_the_layer(kind, arguments, shape) -> None:
    layer = kind(*arguments, identity=True, dtype=torch.float64)
    x, target = torch.randn(2, 8, *shape, dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = (layer(x) - target).square().mean() * 10
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in layer.parameters()]
        assert all(g.isfinite().all() for g in gradients)
        if not losses:  # the scale g does not matter where A = 0
            assert all(p.grad.norm() > 1e-8 for name, p in layer.named_parameters() if name != "g")
        losses.append(loss.item())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(("m", "n"), [(3, 3), (5, 2), (2, 5), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_preimages(m: int, n: int, dtype: torch.dtype) -> None:
    Q = cayley(torch.randn(2, m, n, dtype=dtype))
    torch.testing.assert_close(cayley(cayley_preimage(Q)), Q)


def test_nothing_changes_without_the_option() -> None:
    for kind, k in itertools.product((BCOPConv2d, RKOConv2d, CayleyConv2d, AOCConv2d), (1, 3)):
        torch.manual_seed(0)
        a = kind(4, 4, k)
        torch.manual_seed(0)
        b = kind(4, 4, k, identity=False)
        assert torch.equal(a.weight, b.weight)
        assert not a.identity
        assert not math.isclose(a.weight.abs().max().item(), 1.0)


@pytest.mark.parametrize(("i", "o", "stride"), [(4, 4, 1), (2, 5, 1), (5, 2, 1), (2, 8, 2)])
def test_lires_starts_as_its_identity_whatever_the_gain(i: int, o: int, stride: int) -> None:
    options = {"stride": stride, "gain": 3.0, "bias": False, "dtype": torch.float64}
    layer = LiResConv2d(i, o, 3, identity=True, **options)
    inputs, n = i * stride**2, 24 // stride**2
    matrix = dense_matrix(layer, (i, 4, 6)) @ downsample_matrix(i, (4, 6), (stride, stride)).mT
    eye = torch.eye(n, dtype=torch.float64)
    assert torch.equal(matrix, torch.kron(rectangle(o, inputs, turns=False), eye))
    x = torch.randn(2, i, 4, 6, dtype=torch.float64)
    layer(x).square().sum().backward()
    assert layer.gain.grad is not None
    assert layer.gain.grad != 0, "g leaves 0 by gradients"
    assert LiResConv2d(i, o, 3, **options).gain == 3.0
    transposed = LiResConvTranspose2d(o, i, 3, identity=True, **options)
    assert torch.equal(dense_matrix(transposed, (o, 4 // stride, 6 // stride)), dense_matrix(layer, (i, 4, 6)).mT)


def test_every_method_takes_the_option_and_four_start_as_a_part_of_the_identity() -> None:
    """As docs/models.md says it."""
    x, c, k = torch.randn(2, 4, 5, 5, dtype=torch.float64), 4, 3
    part = {
        "BROConv2d": lambda x: torch.cat((-x[:, :1], x[:, 1:]), 1),  # its rank is c // 4
        "RKOConv2d": lambda x: x / k,
        "FrobeniusConv2d": lambda x: x / (k * c**0.5),
    }
    kinds = [kind for name, kind in vars(layers).items() if name.endswith("Conv2d") and not inspect.isabstract(kind)]
    assert len(kinds) > 15
    for kind in kinds:
        y = kind(c, c, k, identity=True, bias=False, dtype=torch.float64)(x)
        if kind.__name__ == "ShiftConv2d":
            same = [torch.equal(y[:, channel], x[:, channel]) for channel in range(c)]
            assert sum(same) == c // 2, "half of the channels are moved"
            assert all(y[:, n].sum().isclose(x[:, n].sum()) for n in range(c)), "and lose nothing"
        else:
            atol = 0.1 if kind.__name__ in ("CPLConv2d", "SLLConv2d") else 1e-9
            torch.testing.assert_close(y, part.get(kind.__name__, lambda x: x)(x), rtol=0, atol=atol)
