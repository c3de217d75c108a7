"""Padding by zeros: a part of an orthogonal convolution on a larger torus."""

import pytest
import torch
from torch.nn import functional as F

from orthoconv import budget, export, lipschitz_bound
from orthoconv.certificates import in_double
from orthoconv.nn import (
    AOCConv2d,
    AOLConv2d,
    AOLConvTranspose2d,
    BCOPConv2d,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CircularConv2d,
    OSSNConv2d,
    RKOConv2d,
    ShiftConv2d,
    ShiftConvTranspose2d,
)
from orthoconv.testing import dense_matrix

SIZES = [(4, 4), (5, 3), (6, 8)]


def pairs(kind: type, **options):
    """The layer, and the same weights on the torus."""
    options |= {"bias": False, "dtype": torch.float64}
    layers = [kind(4, 6, 3, padding_mode=mode, **options) for mode in ("zeros", "circular")]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


@pytest.mark.parametrize("kind", [CayleyConv2d, CayleyConvTranspose2d, BCOPConv2d, RKOConv2d, OSSNConv2d])
@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_part_of_the_circular_one(kind, options, size) -> None:
    """T = P* Q P, with P the embedding of the image into the torus."""
    layer, whole = (m.eval() for m in pairs(kind, **options))
    d = options.get("dilation", 1)
    torus = (size[0] + 2 * d, size[1] + 2 * d)
    Q = dense_matrix(whole, (4, *torus)).view(6, *torus, 4, *torus)
    T = Q[:, : size[0], : size[1], :, : size[0], : size[1]].flatten(3).flatten(0, 2)
    torch.testing.assert_close(dense_matrix(layer, (4, *size)), T)
    assert torch.linalg.svdvals(T)[0] <= lipschitz_bound(layer, (4, *size)) + 1e-12
    train = dense_matrix(layer.train(), (4, *size))
    torch.testing.assert_close(train, T)


@pytest.mark.parametrize("kind", [CircularConv2d, BCOPConv2d, RKOConv2d, AOCConv2d, ShiftConv2d])
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("i", [4, 1])  # one channel has a gradient of its own
def test_a_kernel_in_space_is_torch_s_convolution(kind, k, i) -> None:
    layer = kind(i, 6, k, padding_mode="zeros", dtype=torch.float64)
    x = torch.randn(2, i, 5, 7, dtype=torch.float64, requires_grad=True)
    before, after = (k - 1) // 2, k // 2
    expected = F.conv2d(F.pad(x, (before, after) * 2), layer.kernel, layer.bias)
    for way in (layer, in_double(layer), export(layer, (i, 5, 7))):
        torch.testing.assert_close(way(x), expected)
    gradients = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (layer(x), expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.parametrize(("upward", "kind"), [(AOLConvTranspose2d, AOLConv2d), (ShiftConvTranspose2d, ShiftConv2d)])
def test_transposed_kernels_are_the_adjoint(upward, kind, k, monkeypatch) -> None:
    monkeypatch.setattr(budget, "SHIFTED_CHANNELS", 1)  # shifts, and not a kernel
    up = upward(6, 4, k, padding_mode="zeros", bias=False, dtype=torch.float64)
    down = kind(4, 6, k, padding_mode="zeros", bias=False, dtype=torch.float64)
    down.load_state_dict(up.state_dict())
    columns = torch.eye(6 * 5 * 7, dtype=torch.float64).view(-1, 6, 5, 7)
    expected = dense_matrix(down, (4, 5, 7))
    assert torch.linalg.matrix_norm(expected) > 0.1
    for way in (up, in_double(up), export(up, (6, 5, 7))):
        torch.testing.assert_close(way(columns).flatten(1), expected)


@pytest.mark.parametrize("k", [3, 4])
def test_shifts_leave_the_image_and_do_not_come_round(k, monkeypatch) -> None:
    layer = ShiftConv2d(4, 6, k, padding_mode="zeros", dtype=torch.float64)
    expected = dense_matrix(layer, (4, 5, 7))
    monkeypatch.setattr(budget, "SHIFTED_CHANNELS", 1)
    torch.testing.assert_close(dense_matrix(layer, (4, 5, 7)), expected)


def test_it_never_expands_and_does_lose_norm() -> None:
    layer, whole = pairs(CayleyConv2d)
    with torch.no_grad():
        layer.g.mul_(4)
        x = torch.randn(8, 4, 6, 6, dtype=torch.float64)
        assert (layer(x).flatten(1).norm(dim=1) < x.flatten(1).norm(dim=1)).all()
        torch.testing.assert_close(whole(x).norm(), x.norm())
    assert lipschitz_bound(layer, (4, 6, 6)) == pytest.approx(1, abs=1e-12)


def test_strides_gradients_and_the_adjoint() -> None:
    layer = CayleyConv2d(2, 8, 4, stride=2, padding_mode="zeros", dtype=torch.float64)
    up = CayleyConvTranspose2d(8, 2, 4, stride=2, padding_mode="zeros", dtype=torch.float64, bias=False)
    up.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "bias"})
    x, y = torch.randn(1, 2, 6, 4, dtype=torch.float64), torch.randn(1, 8, 3, 2, dtype=torch.float64)
    linear = layer(x) - layer(torch.zeros_like(x))
    torch.testing.assert_close((linear * y).sum(), (x * up(y)).sum())
    assert torch.autograd.gradcheck(layer, x.requires_grad_())
    layer(x).sum().backward()
    assert layer.weight.grad.norm() > 0


def test_what_it_cannot_do() -> None:
    layer = CayleyConv2d(4, 4, 3, padding_mode="zeros")
    with pytest.raises(ValueError, match="has no inverse: it is not orthogonal"):
        layer.inverse(torch.zeros(1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"are those of a circular convolution, got .*padding_mode=zeros"):
        layer.singular_values((4, 4))


def test_one_tap_has_no_border() -> None:
    layer, x = CayleyConv2d(4, 4, 1, padding_mode="zeros"), torch.randn(1, 4, 5, 5)
    torch.testing.assert_close(layer.inverse(layer(x)), x)
    assert layer.singular_values((5, 5)).shape == (5, 5, 4)


def test_a_padded_image_can_be_viewed_as_a_vector() -> None:
    for mode in ("zeros", "circular"):
        assert CayleyConv2d(2, 2, 3, padding_mode=mode)(torch.rand(3, 2, 4, 4)).view(3, -1).shape == (3, 32)
