"""Layers of torch made orthogonal: arguments kept, weights projected, refusals, state dicts of plain layers."""

import copy

import pytest
import torch
from oracles import conv_matrix, polar
from torch import Tensor, nn

from orthoconv import fourier, lipschitz_bound, orthogonal
from orthoconv.linalg import cayley, cayley_preimage, pivot_signs
from orthoconv.nn import (
    BROLinear,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
    CircularConv2d,
    LOTConv2d,
    LOTConvTranspose2d,
    RKOConv2d,
    SOCConv2d,
    conv_methods,
    linear_methods,
)
from orthoconv.testing import assert_orthogonal, dense_matrix

CONVS = [
    nn.Conv2d(3, 8, 3, padding=1),
    nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", bias=False),
    nn.Conv2d(4, 4, (3, 5), padding=(1, 2), groups=2),
    nn.Conv2d(3, 3, 3, padding=2, dilation=2),
    nn.Conv2d(3, 8, 4, padding="same"),
    nn.Conv2d(3, 8, 3, stride=2, padding=1),
    nn.Conv2d(3, 8, 7, stride=2, padding=3),
    nn.Conv2d(3, 8, 1, stride=2),
    nn.Conv2d(3, 8, 4, stride=4),
    nn.Conv2d(4, 8, 1, padding="valid"),
    nn.ConvTranspose2d(8, 3, 2, stride=2),
    nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
]


def matrix_of(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    return dense_matrix(layer, shape)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("conv", CONVS, ids=str)
def test_takes_the_place_of_the_old_layer(conv: nn.Module, keep: bool) -> None:
    conv = copy.deepcopy(conv).double().eval()
    before = copy.deepcopy(conv.state_dict())
    layer = orthogonal(conv, keep_weights=keep)
    assert type(layer) is (CayleyConv2d if isinstance(conv, nn.Conv2d) else CayleyConvTranspose2d)
    x = torch.randn(2, conv.in_channels, 8, 12, dtype=torch.float64)
    assert layer(x).shape == conv(x).shape
    assert not layer.training
    assert lipschitz_bound(layer, x.shape[1:]) <= 1 + 1e-12
    for name in ("kernel_size", "stride", "dilation", "groups", "padding_mode"):
        assert getattr(layer, name) == getattr(conv, name)
    assert (layer.bias is None) == (conv.bias is None)
    assert all(torch.equal(conv.state_dict()[k], v) for k, v in before.items()), "the old layer stays as it is"
    if keep and conv.bias is not None:
        assert torch.equal(layer.bias, conv.bias)
        assert layer.bias is not conv.bias


@pytest.mark.parametrize("name", conv_methods())
def test_every_method(name: str) -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
    layer = orthogonal(conv, name, padding_mode="circular")
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    assert layer(x).shape == x.shape
    assert layer.padding_mode == "circular"
    kept = {"aol", "cayley", "crko", "lot", "ossn", "plain", "rko", "svcm"}
    if name in kept:
        orthogonal(conv, name, keep_weights=True)(x).sum().backward()
    else:
        with pytest.raises(ValueError, match=r"cannot start from a .*keep_weights=True"):
            orthogonal(conv, name, keep_weights=True)
    old = nn.ConvTranspose2d(8, 4, 2, stride=2)
    transposed = {"aoc", "aol", "bcop", "bro", "cayley", "cayley_bcop", "crko", "lires", "lot", "rko", "shift", "soc"}
    if name in {*transposed, "soc_taylor"}:
        assert orthogonal(old, name)(torch.randn(1, 8, 3, 3)).shape == (1, 4, 6, 6)
    else:
        with pytest.raises(ValueError, match=r"has no transposed convolution; 'aoc', .*'cayley'"):
            orthogonal(old, name)


@pytest.mark.parametrize("name", linear_methods())
def test_every_linear_method(name: str) -> None:
    assert orthogonal(nn.Linear(6, 4), name)(torch.randn(2, 6)).shape == (2, 4)


@pytest.mark.parametrize("shape", [(5, 5), (3, 5), (5, 3), (1, 1)])
def test_a_linear_layer_starts_as_its_projection(shape: tuple[int, int]) -> None:
    old = nn.Linear(shape[1], shape[0], dtype=torch.float64)
    for sign in (1, -1):  # one of the two has an eigenvalue -1, if the matrix is square and odd
        with torch.no_grad():
            old.weight.mul_(sign)
        for method in ("cayley", "polar"):
            layer = orthogonal(old, method, keep_weights=True)
            expected = polar(old.weight.detach())
            torch.testing.assert_close(matrix_of(layer, (shape[1],)), expected, atol=1e-9, rtol=0)
            assert torch.equal(layer.bias, old.bias)


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2, "kernel_size": 2}], ids=str)
def test_one_tap_starts_as_its_projection(options: dict) -> None:
    arguments = {"kernel_size": 1, "padding_mode": "circular", "dtype": torch.float64} | options
    conv = nn.Conv2d(4, 4, **arguments)
    C = matrix_of(conv, (4, 4, 2))
    torch.testing.assert_close(matrix_of(CayleyConv2d.from_conv(conv, keep_weights=True), (4, 4, 2)), polar(C))


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (3, {"padding": 1}),
        (4, {"padding": "same"}),
        (3, {"padding": 2, "dilation": 2}),
        (3, {"padding": 1, "groups": 2}),
        (2, {"stride": 2}),
        (6, {"stride": 2, "padding": 2}),
        (1, {"stride": 2}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_kernels_are_kept_tap_by_tap(k: int, options: dict) -> None:
    """On circular images the plain layer is the old convolution, also on blocks; and LOT is the nearest to it."""
    conv = nn.Conv2d(2, 4, k, padding_mode="circular", dtype=torch.float64, **options)
    layer = CircularConv2d.from_conv(conv, keep_weights=True)
    x = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), conv(x))
    if k > 1:
        near = matrix_of(LOTConv2d.from_conv(conv, keep_weights=True), (2, 6, 4))
        torch.testing.assert_close(near, polar(matrix_of(conv, (2, 6, 4))), atol=1e-9, rtol=0)


def test_a_transposed_convolution_is_kept() -> None:
    conv = nn.ConvTranspose2d(8, 3, 2, stride=2, dtype=torch.float64)
    layer = LOTConvTranspose2d.from_conv(conv, keep_weights=True)
    torch.testing.assert_close(matrix_of(layer, (8, 2, 3)), polar(matrix_of(conv, (8, 2, 3))), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("i", "o", "most"), [(3, 32, 0.4), (8, 16, 0.6), (16, 8, 0.6), (8, 8, 0.9)])
def test_a_cayley_convolution_starts_near_the_projection(i: int, o: int, most: float) -> None:
    """Distances are relative to the norm; that of unrelated layers is sqrt(2)."""
    conv = nn.Conv2d(i, o, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    D = fourier.spectrum(conv.weight.detach(), (8, 10))
    U, _, Vh = torch.linalg.svd(D, full_matrices=False)

    def distance(layer: nn.Module) -> float:
        return (torch.dist(layer.spectrum((8, 10)), U @ Vh) / (U @ Vh).norm()).item()

    layer = CayleyConv2d.from_conv(conv, keep_weights=True)
    assert distance(layer) < most
    assert distance(CayleyConv2d.from_conv(conv)) > 1.2
    assert_orthogonal(layer, (i, 4, 6), atol=1e-12)


def test_the_identity_and_zero_are_starts() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
    nn.init.dirac_(conv.weight)
    layer, x = orthogonal(conv, keep_weights=True), torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(layer(x), x)
    layer(x).square().sum().backward()
    assert layer.weight.norm() > 1, "a weight from which one can train"
    nn.init.zeros_(conv.weight)
    assert orthogonal(conv, keep_weights=True)(x).isfinite().all()
    nn.init.constant_(conv.weight, torch.nan)
    with pytest.raises(ValueError, match=r"finite weights; the weight of Conv2d.* has norm nan"):
        orthogonal(conv, keep_weights=True)


def test_signs_and_options() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    assert orthogonal(conv).signs is None
    signs = [1, -1, -1, 1]
    assert orthogonal(conv, signs=signs, keep_weights=True).signs.tolist() == signs
    assert orthogonal(conv, signs=signs, keep_weights=True, identity=True).padding_mode == "zeros"
    layer = orthogonal(conv, keep_weights=True)
    other = orthogonal(nn.Conv2d(4, 4, 3, padding=1), keep_weights=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 4, 5, 5)
    assert torch.equal(other(x), layer(x))
    assert isinstance(orthogonal(conv, RKOConv2d), RKOConv2d)
    shrinking = nn.Conv2d(4, 4, 3, padding_mode="circular", dtype=torch.float64)
    kept = orthogonal(shrinking, "plain", padding="same", keep_weights=True)
    torch.testing.assert_close(kept(x.double())[..., 1:-1, 1:-1], shrinking(x.double()))


REFUSALS = [
    (
        nn.Conv2d(3, 8, 3),
        {},
        r'no CayleyConv2d .*padding must be "same", or 1, with .*got \(0, 0\).*padding="same"',
    ),
    (nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), {}, 'must be "circular" or "zeros", got \'reflect\''),
    (nn.Conv2d(3, 8, 3, padding=1), {"method": "nope"}, "method must be one of 'aoc', .*got 'nope'"),
    (nn.Conv2d(3, 8, 3, padding=1), {"method": "qr"}, "'qr' has no convolution; 'aoc'"),
    (nn.ConvTranspose2d(8, 3, 3, stride=2, padding=1), {}, "no CayleyConvTranspose2d .*output_padding must be"),
    (nn.LazyConv2d(3, 3), {}, "has no weight yet"),
    (nn.Linear(3, 4), {"method": "cpl", "keep_weights": True}, "CPLLinear cannot start"),
    (nn.Linear(3, 4), {"method": BROLinear, "keep_weights": True}, r"BROLinear cannot start .*\(4, 1\)"),
]


@pytest.mark.parametrize(("layer", "options", "message"), REFUSALS, ids=[f"{k}" for k in range(len(REFUSALS))])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_refusals(layer: nn.Module, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        orthogonal(layer, **options)


def test_other_layers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"one of nn\.Conv2d, .*got ReLU\(\)"):
        orthogonal(nn.ReLU())
    with pytest.raises(TypeError, match=r"takes the place of nn\.Conv2d, got ConvTranspose2d"):
        CayleyConv2d.from_conv(nn.ConvTranspose2d(3, 3, 3, padding=1))
    with pytest.raises(TypeError, match=r"takes the place of nn\.Linear, got Conv2d"):
        CayleyLinear.from_linear(nn.Conv2d(3, 3, 1))


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        (CayleyConv2d(3, 8, 3), nn.Conv2d(3, 8, 3), r"that has g\. .*orthogonal.*CayleyConv2d\.from_conv"),
        (CayleyConv2d(3, 8, 3, stride=2), nn.Conv2d(3, 8, 3), r"weight looks like that of an nn\.Conv2d"),
        (SOCConv2d(3, 8, 3), nn.Conv2d(3, 8, 3), r"SOCConv2d\.from_conv"),
        (CayleyLinear(3, 8), nn.Linear(3, 8), r"CayleyLinear\.from_linear"),
        (CayleyConvTranspose2d(3, 8, 3), nn.ConvTranspose2d(3, 8, 3), r"an nn\.ConvTranspose2d"),
    ],
)
def test_the_state_dict_of_a_plain_layer_says_what_to_do(new: nn.Module, old: nn.Module, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        new.load_state_dict(old.state_dict())
    with pytest.raises(RuntimeError, match=f"0.{message}" if message.startswith("weight") else message):
        nn.Sequential(new).load_state_dict(nn.Sequential(old).state_dict())


def test_other_state_dicts_are_loaded_as_ever() -> None:
    conv = nn.Conv2d(3, 8, 3)
    layer = LOTConv2d(3, 8, 3)
    layer.load_state_dict(conv.state_dict())
    assert torch.equal(layer.weight, conv.weight)
    with pytest.raises(RuntimeError, match="looks like"):  # torch does not tell a layer that strict is False
        CayleyConv2d(3, 8, 3).load_state_dict(conv.state_dict(), strict=False)
    half = {"weight": torch.ones(8, 3, 3, 3), "g": torch.tensor(2.0)}
    assert CayleyConv2d(3, 8, 3).load_state_dict(half, strict=False).missing_keys == ["bias"]
    with pytest.raises(RuntimeError) as caught:
        CayleyConv2d(3, 8, 3).load_state_dict(CayleyConv2d(3, 6, 3).state_dict())
    assert "looks like" not in str(caught.value)


def test_pivot_signs_bound_the_determinant() -> None:
    for n in (1, 2, 5, 8):
        for _ in range(5):
            Q = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
            signs = pivot_signs(Q)
            assert (signs.abs() == 1).all()
            assert torch.linalg.det(torch.eye(n) + Q * signs) >= 1 - 1e-9
    Q = -torch.eye(3, dtype=torch.float64)
    assert torch.linalg.det(torch.eye(3) + Q) == 0, "without signs there is no preimage"


def test_damped_preimages_are_smaller() -> None:
    Q = cayley(30 * torch.randn(6, 6, dtype=torch.float64))
    exact, damped = cayley_preimage(Q), cayley_preimage(Q, 0.3)
    torch.testing.assert_close(cayley(exact), Q)
    assert damped.norm() < exact.norm() / 4
    assert not torch.allclose(cayley(damped), Q, atol=1e-3)


def test_the_oracle_of_the_projection_is_right() -> None:
    """The matrix of torch's circular convolution is that of the definition, tap by tap."""
    conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    torch.testing.assert_close(matrix_of(conv, (2, 4, 5)), conv_matrix(conv.weight.detach(), (4, 5)))
