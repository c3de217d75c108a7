"""Convolutions of volumes: the contract of tests/test_contract.py with dense oracles in three dimensions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import test_contract as checks
import torch
from contract import _with, reflection, skew_exponential
from oracles import grouped, polar
from torch import Tensor, nn

from orthoconv import certify, export, in_double, lipschitz_bound, orthogonal, rounding_bound, verify
from orthoconv.linalg import cayley
from orthoconv.nn import BROConv3d, CayleyConv3d, LOTConv3d, MaxMin, SOCConv3d, VolumeConv3d, conv_methods
from orthoconv.testing import assert_nonexpansive, dense_matrix


def threefold(value: Any) -> tuple[int, int, int]:
    return value if isinstance(value, tuple) else (value, value, value)


@dataclass(frozen=True)
class Volume:
    """Arguments of a convolution i -> o, and the size of the volume before the stride."""

    i: int
    o: int
    k: int | tuple[int, int, int]
    size: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def stride(self) -> tuple[int, int, int]:
        return threefold(self.options.get("stride", 1))

    @property
    def inner_size(self) -> tuple[int, ...]:
        return tuple(n // s for n, s in zip(self.size, self.stride, strict=True))

    @property
    def inner_channels(self) -> tuple[int, int]:
        return self.i * math.prod(self.stride), self.o


@dataclass(frozen=True)
class Contract:
    """A layer, and its dense matrix found by other means; the fields and methods of contract.Contract."""

    build: Callable[..., nn.Module]
    oracle: Callable[[nn.Module, Volume], Tensor]
    guarantee: str = "orthogonal"
    gradient_options: dict[str, Any] = field(default_factory=dict)
    second_order: bool = True

    def layer(self, case: Volume, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        return self.build(case.i, case.o, case.k, **case.options, **options, dtype=dtype)

    def input_shape(self, case: Volume) -> tuple[int, ...]:
        return (case.i, *case.size)

    def is_isometry(self, case: Volume) -> bool:
        return case.inner_channels[0] <= case.o


def conv_matrix(weight: Tensor, size: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Matrix of the circular convolution of volumes by `weight` (o, i, kd, kh, kw), voxel by voxel and tap by tap."""
    o, i, *taps = weight.shape
    C = weight.new_zeros(o, *size, i, *size)
    for at in itertools.product(*map(range, size)):
        for tap in itertools.product(*map(range, taps)):
            axes = zip(at, tap, taps, dilation, size, strict=True)
            read = tuple((a + d * p - d * (k - 1) // 2) % n for a, p, k, d, n in axes)
            C[(slice(None), *at, slice(None), *read)] += weight[(slice(None), slice(None), *tap)]
    return C.reshape(o * math.prod(size), i * math.prod(size))


def downsample_matrix(channels: int, size: tuple[int, ...], block: tuple[int, ...]) -> Tensor:
    """Permutation matrix that moves blocks of voxels to channels ordered (c, layer, row, column)."""
    inner = [n // s for n, s in zip(size, block, strict=True)]
    P = torch.zeros(channels, *block, *inner, channels, *size, dtype=torch.float64)
    for c in range(channels):
        for at in itertools.product(*map(range, size)):
            places, blocks = zip(*((a % s, a // s) for a, s in zip(at, block, strict=True)), strict=True)
            P[(c, *places, *blocks, c, *at)] = 1
    return P.reshape(channels * math.prod(size), -1)


def matrix(layer: nn.Module, case: Volume, transform: Callable[[Tensor], Tensor], kernel: Tensor) -> Tensor:
    """The transform of the whole convolution matrix of each group, cut to the first channels."""
    (o, i), n = layer.kernel_shape[:2], math.prod(case.inner_size)
    o //= layer.groups

    def one(W: Tensor) -> Tensor:
        return transform(conv_matrix(W, case.inner_size, layer.dilation))[: o * n, : i * n]

    return grouped(kernel.detach(), layer.groups, one)


def cayley_oracle(layer: nn.Module, case: Volume) -> Tensor:
    Q = matrix(layer, case, cayley, layer.kernel)
    if layer.signs is not None:
        Q = Q * layer.signs.repeat_interleave(math.prod(case.inner_size))
    return Q @ downsample_matrix(case.i, case.size, case.stride)


def oracle(transform: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Volume], Tensor]:
    def find(layer: nn.Module, case: Volume) -> Tensor:
        return matrix(layer, case, transform, layer.weight) @ downsample_matrix(case.i, case.size, case.stride)

    return find


LAYERS = {
    "CayleyConv3d": Contract(CayleyConv3d, cayley_oracle),
    "CayleyConv3d signs": Contract(_with(CayleyConv3d, signs="random"), cayley_oracle),
    "LOTConv3d": Contract(LOTConv3d, oracle(polar)),
    "BROConv3d": Contract(BROConv3d, oracle(reflection)),
    "SOCConv3d": Contract(SOCConv3d, oracle(skew_exponential)),
}
CASES = [
    Volume(2, 3, 3, (3, 2, 4)),
    Volume(3, 2, 2, (2, 3, 3)),
    Volume(2, 2, (3, 1, 2), (4, 2, 3), {"bias": False}),
    Volume(3, 2, 1, (2, 3, 2)),
    Volume(2, 2, 5, (2, 3, 4)),
    Volume(3, 4, 3, (1, 1, 1)),
    Volume(2, 3, 3, (1, 5, 1)),
    Volume(1, 8, 3, (4, 2, 2), {"stride": 2}),
    Volume(1, 5, 4, (4, 4, 2), {"stride": (2, 2, 1)}),
    Volume(4, 6, 3, (3, 2, 2), {"groups": 2}),
    Volume(2, 2, 3, (3, 4, 3), {"dilation": (1, 2, 1)}),
    Volume(2, 4, 2, (2, 2, 4), {"groups": 2, "stride": (1, 1, 2)}),
]
CORE = {0, 8, 9}
every_layer = pytest.mark.parametrize("contract", LAYERS.values(), ids=LAYERS.keys())


def marks(name: str, k: int) -> list[pytest.MarkDecorator]:
    return [] if k in CORE or (name == "CayleyConv3d" and k in (2, 6, 10)) else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("contract", "case"),
    [
        pytest.param(contract, case, id=f"{name}-{k}", marks=marks(name, k))
        for name, contract in LAYERS.items()
        for k, case in enumerate(CASES)
    ],
)
def test_contract(contract: Contract, case: Volume) -> None:
    for check in checks.CHECKS:
        check(contract, case)


@every_layer
@pytest.mark.parametrize("mode", ["fast", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("train", "eval"))])
def test_gradients(contract: Contract, mode: str) -> None:
    """All Jacobians in full are slow; the quick suite multiplies them by random vectors."""
    fast, mode = mode == "fast", "train" if mode == "fast" else mode
    checks.test_gradients(contract, Volume(2, 2, (1, 2, 2), (2, 1, 2)), mode, fast=fast)
    checks.test_gradients(contract, Volume(1, 2, 2, (2, 2, 2), {"stride": (1, 2, 1)}), mode, fast=fast)


@every_layer
def test_a_wrong_layer_is_caught(contract: Contract) -> None:
    case = CASES[0]
    wrong = nn.Sequential(contract.layer(case), checks.Scaled(1 + 1e-9))
    expected = contract.oracle(wrong[0], case)
    assert not torch.dist(dense_matrix(wrong, contract.input_shape(case)), expected) <= 100 * checks.EPS * len(expected)


def network() -> nn.Module:
    return nn.Sequential(
        CayleyConv3d(1, 8, 3, stride=2),
        MaxMin(),
        CayleyConv3d(8, 8, 3, padding=1, groups=2, padding_mode="zeros"),
        MaxMin(),
        nn.Flatten(),
        orthogonal(nn.Linear(64, 3)),
    )


def test_certificates_rounding_verification() -> None:
    model, x = network().eval(), torch.randn(8, 1, 4, 4, 4)
    assert 0.99 < lipschitz_bound(model, (1, 4, 4, 4)) < 1 + 1e-5
    exact = in_double(model)(x.double())
    norm = x.flatten(1).norm(dim=1).max().item()
    error = (exact - model(x)).norm(dim=1).max()
    assert 0 < error < 1e-5
    assert error <= rounding_bound(model, (1, 4, 4, 4), norm)
    assert not verify(model, x, claimed=1.0).faults
    certificates = certify(model, [(x, exact.argmax(1))])
    margins = exact.sort(1).values
    radius = (margins[:, -1] - margins[:, -2]) / 2**0.5
    assert (certificates.radius <= radius).all()
    assert (certificates.radius > 0.9 * radius - 1e-4).all()


@every_layer
def test_export(contract: Contract) -> None:
    for case in (Volume(2, 3, 3, (3, 4, 2)), Volume(1, 8, 4, (4, 2, 6), {"stride": 2}), Volume(2, 3, 1, (2, 3, 1))):
        for options in ({}, {"padding_mode": "zeros"}):
            layer = contract.layer(case, torch.float32, **options).eval()
            x = torch.randn(4, *contract.input_shape(case))
            plain = export(layer, x.shape[1:])
            assert not any(isinstance(m, VolumeConv3d) for m in plain.modules())
            torch.testing.assert_close(plain(x), layer(x), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"exported for images of \(3, 4, 2\)"):
        export(contract.layer(Volume(2, 3, 3, (3, 4, 2))).eval(), (2, 3, 4, 2))(torch.zeros(1, 2, 2, 4, 3).double())


@pytest.mark.slow
def test_onnx(tmp_path) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    from orthoconv import to_onnx

    model, x = network().eval(), torch.randn(4, 1, 4, 4, 4)
    to_onnx(model, x, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"stride": (1, 2, 1)}], ids=str)
def test_padding_by_zeros_is_a_part_of_the_torus(options: dict) -> None:
    layer = CayleyConv3d(2, 4, 2, padding_mode="zeros", bias=False, dtype=torch.float64, **options)
    circle = CayleyConv3d(2, 4, 2, bias=False, dtype=torch.float64, **options)
    circle.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2, 2, 4, 3, dtype=torch.float64)
    s, d = threefold(options.get("stride", 1)), threefold(options.get("dilation", 1))
    more = [n * m * (max(1, 2 // n) - 1) for n, m in zip(s, d, strict=True)]
    y = circle(nn.functional.pad(x, (0, more[2], 0, more[1], 0, more[0])))
    torch.testing.assert_close(layer(x), y[..., : 2 // s[0], : 4 // s[1], : 3 // s[2]])
    assert_nonexpansive(layer, (2, 2, 4, 3), atol=1e-12)
    assert layer.promise == "nonexpansive"
    assert layer.singular_values_for((2, 2, 4, 3)) is None
    with pytest.raises(ValueError, match="circular convolution"):
        layer.singular_values((2, 4, 3))


def test_singular_values_stand_at_their_frequencies() -> None:
    """Those of a plain kernel, by the FFT of its taps at every frequency."""

    class Plain(VolumeConv3d):
        @staticmethod
        def orthogonalize(W: Tensor) -> Tensor:
            return W

    layer = Plain(2, 3, (2, 3, 1), bias=False, dtype=torch.float64)
    d, h, w = 3, 4, 5
    C = conv_matrix(layer.weight.detach(), (d, h, w), (1, 1, 1)).view(3, d, h, w, 2, d, h, w)[..., 0, 0, 0]
    D = torch.fft.fftn(C, dim=(1, 2, 3)).permute(1, 2, 3, 0, 4)
    torch.testing.assert_close(layer.singular_values((d, h, w)), torch.linalg.svdvals(D))


def test_takes_the_place_of_torch() -> None:
    for conv in (nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(2, 4, 2, stride=2, groups=2), nn.Conv3d(2, 4, 1)):
        layer = orthogonal(conv)
        assert type(layer) is CayleyConv3d
        assert layer(torch.randn(2, 2, 4, 4, 2)).shape == conv(torch.randn(2, 2, 4, 4, 2)).shape
    one = nn.Conv3d(3, 5, 1, padding_mode="circular", dtype=torch.float64)
    kept = dense_matrix(CayleyConv3d.from_conv(one, keep_weights=True), (3, 1, 2, 1))
    torch.testing.assert_close(kept, polar(dense_matrix(one, (3, 1, 2, 1))))
    conv = nn.Conv3d(2, 4, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    near = dense_matrix(LOTConv3d.from_conv(conv, keep_weights=True), (2, 3, 2, 4))
    torch.testing.assert_close(near, polar(dense_matrix(conv, (2, 3, 2, 4))), atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match=r"kernels of one tap alone .*LOTConv3d"):
        orthogonal(conv, keep_weights=True)
    with pytest.raises(ValueError, match="'rko' has no convolution of volumes; 'bro', 'cayley', 'lot', 'soc'"):
        orthogonal(conv, "rko")
    with pytest.raises(RuntimeError, match=r"nn\.Conv3d, .*CayleyConv3d\.from_conv"):
        CayleyConv3d(2, 4, 3).load_state_dict(conv.state_dict())
    assert "conv3d" not in conv_methods()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": (3, 3)}, r"kernel_size must be a positive int or three of them, got \(3, 3\)"),
        ({"kernel_size": 3, "stride": 0}, "stride must be .*got 0"),
        ({"kernel_size": 3, "padding": 0}, r'"same", or 1, with .*got 0'),
        ({"kernel_size": 3, "padding": (1, 1)}, r"got \(1, 1\)"),
        ({"kernel_size": 3, "padding_mode": "reflect"}, "must be .*got 'reflect'"),
        ({"kernel_size": 3, "groups": 2}, "groups must divide"),
        ({"kernel_size": 3, "in_channels": 0}, "in_channels must be .*got 0"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CayleyConv3d(**{"in_channels": 3, "out_channels": 3} | options)


def test_bad_inputs() -> None:
    layer = CayleyConv3d(3, 4, 3, stride=2)
    for shape in [(2, 3, 4, 4), (2, 3, 4, 4, 3), (2, 4, 4, 4, 4), (4, 4, 4), (2, 3, 0, 4, 4)]:
        with pytest.raises(ValueError, match=r"takes volumes of shape|multiples of its stride"):
            layer(torch.randn(shape))
    with pytest.raises(TypeError, match="float64"):
        layer(torch.randn(2, 3, 2, 2, 2, dtype=torch.float64))


def test_formats_batches_and_starts() -> None:
    layer, x = CayleyConv3d(3, 4, 3), torch.randn(2, 3, 3, 4, 5)
    y = layer(x)
    assert layer(x[0]).shape == (4, 3, 4, 5)
    torch.testing.assert_close(layer(x.contiguous(memory_format=torch.channels_last_3d)), y)
    assert layer(x[:0]).shape == (0, 4, 3, 4, 5)
    torch.testing.assert_close(torch.func.vmap(layer)(x), y)
    same = CayleyConv3d(3, 3, 3, identity=True, bias=False)
    torch.testing.assert_close(same(x), x)
    assert str(CayleyConv3d(3, 8, 3, stride=(1, 2, 2))) == (
        "CayleyConv3d(3, 8, kernel_size=(3, 3, 3), stride=(1, 2, 2))"
    )
