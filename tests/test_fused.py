"""The paths that training takes: images beyond the matrix transform, factors in place of inverses, chunks, patches."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from contract import LAYERS, Case
from torch import Tensor

from orthoconv import budget, fourier, planes
from orthoconv.linalg import cayley
from orthoconv.nn import CayleyConv2d
from orthoconv.nn import lift as lift_module
from orthoconv.nn.kernel import same_conv2d

CASES = [
    Case(3, 3, 3, (9, 8)),
    Case(2, 5, 3, (8, 9)),
    Case(5, 2, 3, (10, 7)),
    Case(2, 3, 2, (9, 9), {"dilation": 2}),
    Case(4, 6, 3, (9, 8), {"groups": 2}),
    Case(6, 4, (3, 1), (8, 10), {"groups": 2, "bias": False}),
    Case(1, 3, 4, (18, 10), {"stride": 2}),
    Case(2, 2, 9, (10, 9)),
    Case(2, 19, 3, (9, 8)),
    Case(1, 7, (2, 3), (9, 8), {"dilation": (2, 1)}),
    Case(1, 12, (4, 3), (9, 8), {"dilation": (1, 2)}),
    Case(1, 12, (4, 3), (9, 8)),
]
KINDS = ["CayleyConv2d", "CayleyConv2d signs", "CayleyConvTranspose2d"]
every_pair = pytest.mark.parametrize(  # the quick suite has a third of those that share the path of CayleyConv2d
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{case}-{kind}", marks=[pytest.mark.slow] if n and k % 3 != n - 1 else [])
        for n, kind in enumerate(KINDS)
        for k, case in enumerate(CASES)
    ],
)


PATHS = ["best", "matrices", "fused", "lifted", "factors", "chunks", "again", "fast transform"]


@contextmanager
def path(name: str) -> Iterator[None]:
    """Each way of computing, forced on matrices that are too small to need it."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "factors":
            patch.setattr(budget, "INVERTED_ROWS", math.inf)
            patch.setattr(budget, "INVERTED_ORDER", (0, 0))
        if name == "again":  # factors are not kept
            patch.setattr(budget, "FACTORS_KEPT", 0)
            patch.setattr(budget, "FACTORS_BYTES", 0)
        if name == "fast transform":
            patch.setattr(budget, "DENSE_SIDE", 0)
        if name == "chunks":
            patch.setattr(budget, "CHUNK_BYTES", 1)
            patch.setattr(budget, "FEWEST_FREQUENCIES", 1)
        with CayleyConv2d.forced(name) if name in ("matrices", "fused", "lifted") else nullcontext():
            yield


@every_pair
def test_every_path_equals_the_dense_oracle(kind: str, case: Case) -> None:
    contract = LAYERS[kind]
    layer = contract.layer(case)
    shape = contract.input_shape(case)
    expected = contract.oracle(layer, case)
    for x in (torch.randn(1, *shape, dtype=torch.float64), torch.randn(7, *shape, dtype=torch.float64)):
        product = x.flatten(1) @ expected.mT
        for name in PATHS:
            with path(name):
                y = layer(x) if layer.bias is None else layer(x) - layer.bias[:, None, None]
            torch.testing.assert_close(y.flatten(1), product, msg=lambda text, name=name: f"{name}: {text}")


@every_pair
def test_modes_agree_to_the_bit(kind: str, case: Case) -> None:
    contract = LAYERS[kind]
    layer, x = contract.layer(case), torch.randn(3, *contract.input_shape(case), dtype=torch.float64)
    trained = layer(x)
    assert torch.equal(layer.eval()(x), trained)
    with torch.no_grad():
        assert torch.equal(layer(x), trained)


@every_pair
def test_gradients_are_those_of_the_formed_matrices(kind: str, case: Case) -> None:
    contract = LAYERS[kind]
    layer = contract.layer(case)

    def formed(x: Tensor) -> Tensor:
        size = case.inner_size
        W = fourier.spectrum(layer.kernel, size, dilation=layer.dilation, groups=layer.groups)
        Q = cayley(W) if layer.signs is None else cayley(W) * layer.signs.view(layer.groups, 1, 1, -1)
        moved = torch.nn.functional.pixel_unshuffle(x, case.stride[0]) if not contract.transposed else x
        y = fourier.spectral_conv2d(moved, Q.mH if contract.transposed else Q)
        y = torch.nn.functional.pixel_shuffle(y, case.stride[0]) if contract.transposed else y
        return y if layer.bias is None else y + layer.bias[:, None, None]

    for b, names in ((3, [name for name in PATHS if name != "factors"]), (1, ["factors"])):
        x = torch.randn(b, *contract.input_shape(case), dtype=torch.float64, requires_grad=True)
        sources, y = (x, *layer.parameters()), formed(x)
        direction = torch.randn_like(y)
        expected = torch.autograd.grad((y * direction).sum(), sources)
        for name in names:
            with path(name):
                found = torch.autograd.grad((layer(x) * direction).sum(), sources)
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[pytest.mark.slow] if k % 3 else []) for k, case in enumerate(CASES)],
)
def test_second_derivatives(case: Case) -> None:
    layer = LAYERS["CayleyConv2d"].layer(case)
    names, values = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(2, *LAYERS["CayleyConv2d"].input_shape(case), dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (x, *(v.detach().requires_grad_() for v in values))
    torch.autograd.gradcheck(run, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_the_cases_reach_every_path() -> None:
    layers = [LAYERS["CayleyConv2d"].layer(case) for case in CASES]
    ways = [layer.way(case.inner_size) for layer, case in zip(layers, CASES, strict=True)]
    assert ways == ["fused"] * 7 + ["matrices", "lifted", "fused", "lifted", "lifted"]
    with CayleyConv2d.forced("lifted"):
        ways = [layer.way(case.inner_size) for layer, case in zip(layers, CASES, strict=True)]
        assert [k for k, way in enumerate(ways) if way == "lifted"] == [1, 8, 10, 11]
        assert all(layer.way(c.inner_size, adjoint=True) != "lifted" for layer, c in zip(layers, CASES, strict=True))
    with CayleyConv2d.forced("matrices"):
        assert {layer.way(case.inner_size) for layer, case in zip(layers, CASES, strict=True)} == {"matrices"}
    assert {layer.eval().way((9, 9), eager=False) for layer in layers} == {"matrices"}
    for name, kind in (("best", planes.AxesPlane), ("fast transform", planes.FastPlane)):
        with path(name):
            found = [planes.plane(c.inner_size, torch.float64, torch.device("cpu")) for c in CASES[:6]]
        assert all(isinstance(p, kind) for p in found)


def test_large_weights_are_not_lifted() -> None:
    """In space the rounding error grows with the kernel; beyond a bound the layer is applied by its matrices."""
    layer = CayleyConv2d(2, 19, 3)
    x = torch.randn(4, 2, 12, 12)
    for g in (0.1, 1.0, 30.0, 31.9, 33.0, 1e3):
        with torch.no_grad():
            layer.g.fill_(g)
            layer.bias.zero_()
            assert (layer.way((12, 12)) == "lifted") == (g <= budget.LIFTED_NORM)
            layer.eval()
            ratios = layer(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
        assert (ratios - 1).abs().max() < 1e-5


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (5, 4), (8, 8), (4, 16), (9, 8), (7, 13), (16, 16)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [planes.MatrixPlane, planes.AxesPlane, planes.FastPlane])
def test_planes(size: tuple[int, int], groups: int, kind: type[planes.Plane]) -> None:
    x = torch.randn(3, 4, *size, dtype=torch.float64)
    p = planes._plane(kind, size, x.dtype, x.device)
    X = p.transform(x)
    torch.testing.assert_close(p.invert(X), x)
    with torch.no_grad():
        torch.testing.assert_close(p.invert(X), x)
        with path("chunks"):
            torch.testing.assert_close((p.transform(x), p.invert(X)), (X, x))
    Y = p.take(X, slice(None), groups)
    assert Y.shape == (len(p) * groups, 3, 4 // groups)
    torch.testing.assert_close(p.join(Y, groups), X)
    again = p.empty(x, 4)
    half = len(p) // 2
    p.put(again, slice(0, half), groups, p.take(X, slice(0, half), groups))
    p.put(again, slice(half, len(p)), groups, p.take(X, slice(half, len(p)), groups))
    assert torch.equal(again, X)
    whole = p.whole(Y.unflatten(0, (-1, groups)))
    torch.testing.assert_close(whole.permute(2, 1, 3, 0).flatten(1, 2), torch.fft.rfft2(x).flatten(2))
    torch.testing.assert_close(p.mean(X).real, x.sum((2, 3)))


def test_the_matrix_plane_has_just_the_frequencies_that_differ() -> None:
    for h, w in [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (4, 5), (8, 8)]:
        p = planes.plane((h, w), torch.float64, torch.device("cpu"))
        real = sum((2 * u) % h == 0 and (2 * v) % w == 0 for u in range(h) for v in range(w))
        assert len(p) == (h * w + real) // 2


def test_chunks_cover_everything_once() -> None:
    for n, each in [(1, 1), (7, 2**30), (100, 2**20), (5, 2**24)]:
        for least in (1, 3, 16):
            parts = list(planes.chunks(n, each, least))
            assert [k for some in parts for k in range(some.start, some.stop)] == list(range(n))
            assert all(some.stop - some.start >= min(least, n) / 2 for some in parts[:-1])


def test_lift_is_a_convolution() -> None:
    y, x = torch.randn(2, 3, 3, 7, 6, dtype=torch.float64).unbind()
    y, x = y[:, :2], x[:, 1:]
    V, bias = torch.randn(5, 2, 3, 2, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = torch.cat((y, -same_conv2d(x + y, V, dilation=(2, 1))), dim=1) + bias[:, None, None]
    torch.testing.assert_close(lift_module.lift(y, x, V, bias, (2, 1)), expected)


@pytest.mark.parametrize(("i", "o"), [(200, 200), (150, 170)])
def test_factors_in_float32_are_as_accurate_as_inverses(i: int, o: int) -> None:
    """Orders above the threshold, fewer images than channels: no matrix is inverted."""
    layer = CayleyConv2d(i, o, 3, bias=False)
    x = torch.randn(4, i, 4, 4)
    with torch.no_grad():
        ratios = layer(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert (ratios - 1).abs().max() < 1e-5 * math.sqrt(2)


@pytest.mark.parametrize(
    ("images", "sizes", "kept"),
    [
        (4, {}, True),  # few bytes in all
        (4, {"FACTORS_BYTES": 0}, False),
        (5, {"FACTORS_BYTES": 0}, True),  # as many as four times the images
        (4, {"FACTORS_BYTES": 0, "FACTORS_ORDER": 19}, True),
    ],
)
def test_factors_of_many_bytes_are_computed_again(
    images: int, sizes: dict[str, int], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in sizes.items():
        monkeypatch.setattr(budget, name, size)
    layer, x = CayleyConv2d(20, 20, 3), torch.randn(images, 20, 9, 8)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        layer(x)
    assert any(shape[1:] == (20, 20) for shape in saved if len(shape) == 3) == kept
