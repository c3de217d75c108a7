"""AOC and shift convolutions: native strides, ranks, scales of the parameters, exported forms."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from oracles import conv_matrix
from torch import nn
from torch.nn import functional as F

from orthoconv import budget, export, in_double, lipschitz_bound, rounding_bound, to_onnx
from orthoconv.nn import (
    AOCConv2d,
    AOCConvTranspose2d,
    AOLConvTranspose2d,
    BCOPConvTranspose2d,
    CircularConv2d,
    FrobeniusLinear,
    MaxMin,
    QRLinear,
    RKOConvTranspose2d,
    ShiftConv2d,
    ShiftConvTranspose2d,
)
from orthoconv.nn.reparametrized import Reparametrized
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix, orthogonality_error

STRIDES = [(k, s, d, p) for k, s, d in itertools.product((1, 3, 4, 6), (1, 2, 3), (1, 2, 3)) for p in range(8)
           if s <= k and math.gcd(s, d) == 1 and 0 <= d * (k - 1) - 2 * p < s]  # fmt: skip


def strided_pair(k: int, s: int, d: int, p: int, mode: str) -> tuple[AOCConv2d, AOCConvTranspose2d]:
    """A layer without bias, and its adjoint."""
    options = {"stride": s, "padding": p, "dilation": d, "padding_mode": mode, "bias": False, "dtype": torch.float64}
    down = AOCConv2d(2, 5, k, **options).eval()
    up = AOCConvTranspose2d(5, 2, k, output_padding=s - 1 - d * (k - 1) + 2 * p, **options).eval()
    up.load_state_dict(down.state_dict())
    return down, up


@pytest.mark.parametrize(("k", "s", "d", "p"), STRIDES)
@pytest.mark.parametrize("mode", ["circular", "zeros"])
def test_reads_the_pixels_that_torch_reads(k: int, s: int, d: int, p: int, mode: str) -> None:
    down, up = strided_pair(k, s, d, p, mode)
    plain = nn.Conv2d(2, 5, k, s, p, d, bias=False, padding_mode=mode, dtype=torch.float64).requires_grad_(False)
    plain.weight.copy_(down.kernel)
    x, y = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((2, 12, 18), (5, 12 // s, 18 // s)))
    torch.testing.assert_close(down(x), plain(x))
    torch.testing.assert_close((down(x) * y).sum(), (x * up(y)).sum())
    for layer, z in ((down, x), (up, y)):
        torch.testing.assert_close(in_double(layer)(z), layer(z))
        torch.testing.assert_close(export(layer, z.shape[1:])(z), layer(z))


@pytest.mark.parametrize(("s", "k"), [(1, 3), (2, 2), (2, 3), (2, 4), (3, 4), ((1, 2), (2, 3))])
@pytest.mark.parametrize(("i", "o"), [(1, 1), (1, 3), (1, 4), (1, 5), (2, 7), (2, 8), (2, 9), (3, 2), (2, 20)])
def test_every_pair_of_channels_is_orthogonal(s: int, k: int, i: int, o: int) -> None:
    """Isometry or co-isometry, with outputs that are no multiple of the block, too."""
    layer = AOCConv2d(i, o, k, stride=s, dtype=torch.float64)
    matrix = dense_matrix(layer, (i, 6, 6))
    assert len(torch.linalg.svdvals(matrix)) == min(matrix.shape)
    assert_orthogonal(matrix, atol=1e-12)
    assert layer.kernel.shape == (o, i, *layer.kernel_size)


@pytest.mark.parametrize("kind", [AOCConv2d, ShiftConv2d])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("i", "o"), [(8, 8), (3, 8), (8, 3)])
@pytest.mark.parametrize("scale", [1e-3, pytest.param(1.0, marks=pytest.mark.slow), 1e3])
def test_orthogonal_at_any_scale_and_after_steps(kind: type, stride: int, i: int, o: int, scale: float) -> None:
    for dtype, atol in ((torch.float64, 1e-10), (torch.float32, 2e-6 * math.sqrt(max(i * stride**2, o)))):
        layer = kind(i, o, 4, stride=stride, bias=False, dtype=dtype)
        with torch.no_grad():
            for source in layer.sources():
                source.copy_(torch.randn_like(source) * scale)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 * scale**2)
        x, target = (torch.randn(4, *shape, dtype=dtype) for shape in ((i, 4, 6), (o, 4 // stride, 6 // stride)))
        losses = []
        for _ in range(3):
            assert_orthogonal(dense_matrix(layer, (i, 4, 6)).double(), atol=atol)
            loss = (layer(x) - target).square().sum() / 100
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        assert losses[-1] != losses[0]
        assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("kind", [AOCConv2d, ShiftConv2d])
def test_zero_padding_never_expands(kind: type) -> None:
    layer = kind(3, 12, 5, stride=2, padding_mode="zeros", dtype=torch.float64)
    assert layer.promise == "nonexpansive"
    assert_nonexpansive(layer, (3, 6, 8), atol=1e-12)
    assert orthogonality_error(layer, (3, 6, 8)) > 1e-3
    assert lipschitz_bound(layer, (3, 6, 8)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 2, "stride": 3}, r"at least the stride.* got kernel_size=\(2, 2\) with stride=\(3, 3\)"),
        ({"kernel_size": (3, 1), "stride": 2}, r"at least the stride.* got kernel_size=\(3, 1\)"),
        ({"kernel_size": 4, "stride": 2, "dilation": 2}, r"no common divisor.* got stride=\(2, 2\) with dilation=\(2"),
        ({"kernel_size": 3, "stride": 2, "padding": 0}, r"padding must be .* or 1, with .* got 0"),
    ],
)
def test_refusals(options, message) -> None:
    for kind in (AOCConv2d, AOCConvTranspose2d):
        with pytest.raises(ValueError, match=message):
            kind(4, 4, **options)


def test_a_common_divisor_would_leave_pixels_unread() -> None:
    """Why it is refused: the same kernel at such a dilation is not orthogonal."""
    kernel = AOCConv2d(2, 8, 4, stride=2, bias=False, dtype=torch.float64).kernel.detach()
    for dilation, good in ((1, True), (2, False), (3, True)):
        x = torch.eye(2 * 144, dtype=torch.float64).view(-1, 2, 12, 12)
        x = F.pad(x, (0, 3 * dilation, 0, 3 * dilation), mode="circular")
        y = F.conv2d(x, kernel, None, 2, 0, dilation)[..., :6, :6]
        assert (orthogonality_error(y.flatten(1)) < 1e-12) == good


# Shifts


def test_the_kernel_is_a_cross_and_is_what_is_applied() -> None:
    layer = ShiftConv2d(6, 8, (5, 3), dilation=(1, 2), moved=0.75, bias=False, dtype=torch.float64)
    kernel, cross = layer.kernel.detach(), torch.zeros(5, 3)
    cross[2, :] = cross[:, 1] = 1
    assert torch.equal(kernel.abs().sum((0, 1)) > 0, cross > 0)
    torch.testing.assert_close(dense_matrix(layer, (6, 7, 5)), conv_matrix(kernel, (7, 5), (1, 2)))


@pytest.mark.parametrize(
    ("i", "o", "k", "options"),
    [
        (4, 4, 3, {}),
        (2, 5, 3, {"padding_mode": "zeros"}),
        (5, 2, (2, 5), {"dilation": (3, 1)}),
        (4, 8, 4, {"groups": 2, "stride": 2}),
    ],
)
@pytest.mark.parametrize("kind", [ShiftConv2d, ShiftConvTranspose2d])
def test_two_matrices_are_the_kernel(kind: type, i: int, o: int, k: int, options, monkeypatch) -> None:
    layer = kind(i, o, k, **options, dtype=torch.float64)
    x = torch.randn(2, i, 6, 4, dtype=torch.float64, requires_grad=True)

    def run(channels: int) -> list[torch.Tensor]:
        monkeypatch.setattr(budget, "SHIFTED_CHANNELS", channels)
        y = layer(x)
        gradients = torch.autograd.grad(y.pow(3).sum(), (x, *layer.parameters()))
        return [y, *gradients, layer.eval()(x), *map(torch.as_tensor, (layer.train().rounding_units((i, 6, 4)),))]

    for a, b in zip(run(1), run(100), strict=True):
        torch.testing.assert_close(a, b)


def test_shares_of_the_channels() -> None:
    """An eighth of the channels in each of four directions, and half of them stay."""
    layer = ShiftConv2d(16, 16, 3, bias=False, identity=True)
    kernel = layer.kernel.detach().sum((0, 1))
    assert kernel.tolist() == [[0, 2, 0], [2, 8, 2], [0, 2, 0]]
    assert ShiftConv2d(16, 16, 3, moved=0.0, identity=True).kernel.sum((0, 1))[1, 1] == 16


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", [ShiftConv2d, ShiftConvTranspose2d])
@pytest.mark.parametrize("mode", ["circular", "zeros"])
@pytest.mark.parametrize("bias", [True, False])
def test_position_is_added_to_the_input(stride: int, kind: type, mode: str, bias: bool) -> None:
    options = {"stride": stride, "padding_mode": mode, "bias": bias, "dtype": torch.float64}
    layer, bare = kind(3, 12, 4, position=(6, 8), **options).eval(), kind(3, 12, 4, **options).eval()
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "position"})
    nn.init.normal_(layer.position)
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    expected = bare(x + layer.position)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0]), expected[0])
    torch.testing.assert_close(in_double(layer)(x), expected)
    torch.testing.assert_close(export(layer, (3, 6, 8))(x), expected)
    if mode == "circular" and (kind is ShiftConv2d):
        torch.testing.assert_close(layer.inverse(expected), x)
    layer(x).square().sum().backward()
    assert layer.position.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"takes images of its position=\(6, 8\), got \(1, 3, 4, 8\)"):
        layer(torch.zeros(1, 3, 4, 8, dtype=torch.float64))


def test_rounding_of_the_position_is_bounded() -> None:
    layer = ShiftConv2d(8, 8, 3, position=(6, 6)).eval()
    nn.init.normal_(layer.position, std=100.0)
    layer.bias.data.fill_(50)
    x = torch.randn(20, 8, 6, 6)
    error = (layer(x) - in_double(layer)(x.double())).flatten(1).norm(dim=1).max().item()
    assert 0 < error < rounding_bound(layer, (8, 6, 6), x.flatten(1).norm(dim=1).max().item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moved": 1.5}, "moved must be a number from 0 to 1, got 1.5"),
        ({"moved": True}, "moved must be a number from 0 to 1, got True"),
        ({"moved": "all"}, "moved must be a number from 0 to 1, got 'all'"),
        ({"position": (0, 4)}, r"position must be a positive int or a pair of them, got \(0, 4\)"),
    ],
)
def test_bad_options_of_shifts(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        ShiftConv2d(4, 4, 3, **options)


# Networks


@pytest.mark.parametrize(
    "scale",
    [pytest.param(scale, marks=pytest.mark.slow if scale == 1 else pytest.mark.long) for scale in (1, 1e-3, 1e3)],
)
def test_onnx_before_and_after_training(scale: float, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(
        AOCConv2d(1, 8, 4, stride=2), MaxMin(), ShiftConv2d(8, 8, 3, position=(4, 4)), MaxMin(),
        BCOPConvTranspose2d(8, 2, 4, stride=2), AOLConvTranspose2d(2, 2, 3), RKOConvTranspose2d(2, 2, 1),
        ShiftConvTranspose2d(2, 4, 3), AOCConvTranspose2d(4, 4, 3, groups=2), nn.Flatten(), QRLinear(256, 8),
        FrobeniusLinear(8, 5),
    )  # fmt: skip
    with torch.no_grad():
        for source in itertools.chain.from_iterable(m.sources() for m in model if isinstance(m, Reparametrized)):
            source.mul_(scale)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(2):
        x = torch.rand(5, 1, 8, 8)
        to_onnx(model.eval(), x, tmp_path / "model.onnx")
        session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.tensor(logits), model(x).detach(), rtol=0, atol=1e-5)
        assert lipschitz_bound(model, (1, 8, 8)) < 1 + 2e-5
        for _ in range(3 * (step == 0)):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x), torch.arange(5)).backward()
            optimizer.step()


def test_a_native_stride_costs_k_by_k_taps() -> None:
    """The other layers have half as many taps on four times the channels."""
    assert AOCConv2d(8, 8, 4, stride=2).kernel.shape == (8, 8, 4, 4)
    assert CircularConv2d(8, 8, 4, stride=2).kernel.shape == (8, 32, 2, 2)
