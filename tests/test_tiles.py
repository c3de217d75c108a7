"""Large images in eval mode, tile by tile: against the exact operator, and what is said about the difference."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from orthoconv import budget, lipschitz_bound, rounding_bound
from orthoconv.nn import CayleyConv2d, CayleyConvTranspose2d
from orthoconv.nn.fused import cayley_at, cayley_matrices
from orthoconv.nn.tiles import convolve_tiles, cut_kernel, deviation


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 pixels; `gentle` says for which images. The FFT transforms them, as it does usual ones."""
    monkeypatch.setattr(budget, "TILES", (32, 16))
    monkeypatch.setattr(budget, "DENSE_SIDE", 0)
    monkeypatch.setattr(budget, "TILED_BYTES", None)


def gentle(*args, g: float = 0.2, kind=CayleyConv2d, **options) -> CayleyConv2d:
    """A layer whose kernel decays fast, and which goes by tiles of 32 pixels on all larger images."""
    torch.manual_seed(0)
    layer = kind(*args, **options).eval().requires_grad_(False)
    layer.g.fill_(g)
    budget.TILED_BYTES = layer._remembered_bytes((32, 32))  # the fixture puts the old one back
    return layer


def matrices(layer: CayleyConv2d, x: Tensor) -> Tensor:
    with CayleyConv2d.forced("matrices"):
        return layer(x)


def exact(layer: CayleyConv2d, x: Tensor) -> Tensor:
    """The same by the operator in float64, which adds no rounding of its own."""
    return matrices(deepcopy(layer).double(), x.double()).to(x.dtype)


LAYERS = {
    "square": {"args": (3, 3, 3)},
    "wide": {"args": (4, 3, 3)},
    "tall": {"args": (3, 4, 3)},
    "even kernel": {"args": (3, 3, 4), "g": 0.02},
    "groups": {"args": (6, 6, 3), "groups": 2},
    "stride": {"args": (1, 4, 4, 2)},
    "dilation, no bias": {"args": (3, 3, 3), "dilation": 2, "bias": False, "g": 0.02},
    "signs": {"args": (3, 3, 3), "signs": "random"},
    "zeros": {"args": (3, 3, 3), "padding": 1, "padding_mode": "zeros"},
    "transposed": {"args": (4, 1, 4, 2), "kind": CayleyConvTranspose2d},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [(48, 41), (90, 66)])
def test_tiles_give_what_the_exact_operator_gives(name: str, size: tuple[int, int]) -> None:
    args, options = LAYERS[name]["args"], {k: v for k, v in LAYERS[name].items() if k != "args"}
    layer = gentle(*args, **options)
    s = 2 if name == "stride" else 1
    x = torch.randn(2, args[0], *(s * n for n in size))
    inner = layer.geometry.inner_size(layer.geometry.size_of(x.shape))
    assert layer.way(inner, adjoint=layer.transposed) == "tiled"
    torch.testing.assert_close(layer(x), exact(layer, x), atol=2e-6, rtol=0)
    assert layer._memory.operators.keys() == {("tile", 32)}


def test_gradients_of_images_and_the_inverse() -> None:
    layer = gentle(3, 3, 3)
    x = torch.randn(1, 3, 50, 44, requires_grad=True)
    v = torch.randn(1, 3, 50, 44)
    ours, theirs = (torch.autograd.grad(f(x), x, v)[0] for f in (layer, lambda x: exact(layer, x)))
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    torch.testing.assert_close(layer.inverse(layer(x.detach())), x.detach(), atol=5e-6, rtol=0)


def test_gradients_of_weights_are_those_of_the_exact_operator() -> None:
    layer = gentle(3, 3, 3).requires_grad_()
    x = torch.randn(1, 3, 50, 44)
    layer(x).square().mul(x).sum().backward()
    ours = layer.weight.grad.clone()
    layer.weight.grad = None
    matrices(layer, x).square().mul(x).sum().backward()
    torch.testing.assert_close(ours, layer.weight.grad, atol=1e-3, rtol=1e-4)


def test_deviation_is_that_of_the_dense_matrices() -> None:
    """Against the spectrum of the cut kernel, laid on the large torus tap by tap."""
    torch.manual_seed(0)
    W, t, (h, w) = torch.randn(3, 4, 3, 3, dtype=torch.float64) / 6, 16, (21, 18)
    D = cut_kernel(cayley_matrices(W, (t, t)), t)
    kernel = torch.fft.irfft2(D.view(t, t // 2 + 1, 3, 4), s=(t, t), dim=(0, 1))
    large = torch.zeros(h, w, 3, 4, dtype=torch.float64)
    for r in range(-(t // 2), t // 2):
        for c in range(-(t // 2), t // 2):
            if max(abs(r), abs(c)) > t // 4:
                assert kernel[r, c].abs().max() < 1e-15
            large[r % h, c % w] += kernel[r, c]
    exact = cayley_matrices(W, (h, w))[:, 0]
    oracle = torch.linalg.matrix_norm(torch.fft.rfft2(large, dim=(0, 1)).flatten(0, 1) - exact).max()
    assert oracle > 1e-4  # there is something to measure
    torch.testing.assert_close(deviation(D, t, cayley_at(W, (h, w)), (h, w)), oracle)

    x = torch.randn(1, 4, h, w, dtype=torch.float64)
    X = torch.fft.rfft2(x)[0].flatten(1)
    Y = torch.einsum("foi,if->of", torch.fft.rfft2(large, dim=(0, 1)).flatten(0, 1), X).view(1, 3, h, w // 2 + 1)
    torch.testing.assert_close(convolve_tiles(x, D, t), torch.fft.irfft2(Y, s=(h, w)))


def test_a_kernel_that_decays_slowly_is_not_cut() -> None:
    layer, x = gentle(3, 3, 3, g=6.0), torch.randn(1, 3, 50, 44)
    assert layer.way((50, 44)) != "tiled"
    torch.testing.assert_close(layer(x), matrices(layer, x), atol=1e-5, rtol=0)
    double = gentle(3, 3, 3, g=2.0).double()
    assert double.way((50, 44)) != "tiled"  # what float32 does not see, float64 does


def test_what_is_lost_counts_as_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, size = gentle(3, 3, 3, g=1.6), (50, 44)
    monkeypatch.setattr(budget, "TILED_UNITS", 1e9)
    assert layer.way(size) == "tiled"
    units = layer.rounding_units((1, 3, *size))
    x = torch.randn(4, 3, *size)
    error = (layer(x) - matrices(layer, x)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    lost = layer._cut_units(size, 32)
    assert lost > 1000
    assert units > lost
    unit = torch.finfo(torch.float32).eps / 2
    assert error.max() < units * unit
    monkeypatch.setattr(budget, "TILED_BYTES", 10**9)
    assert error.max() > layer.rounding_units((1, 3, *size)) * unit  # the control: without it the bound would not hold


def test_many_images_and_training_go_by_the_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = gentle(3, 3, 3), torch.randn(3, 3, 50, 44)
    monkeypatch.setattr(budget, "TILED_IMAGES", 2)
    monkeypatch.setattr("orthoconv.nn.cayley.cut_kernel", lambda *_, **__: pytest.fail("cut the kernel"))
    torch.testing.assert_close(layer(x), exact(layer, x), atol=2e-6, rtol=0)
    assert layer.train().way((50, 44)) == "fused"


def test_weights_that_need_gradients_pay_for_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = gentle(3, 3, 3).requires_grad_()
    monkeypatch.setattr("orthoconv.nn.cayley.cut_kernel", lambda *_, **__: pytest.fail("cut the kernel"))
    layer(torch.randn(1, 3, 50, 44)).sum().backward()


def test_what_is_not_used_is_not_remembered() -> None:
    layer, x = gentle(3, 3, 3, g=6.0), torch.randn(1, 3, 50, 44)
    layer(x)
    assert layer._memory.operators.keys() == {(50, 44)}
    assert layer._memory.numbers.keys() == {("lost", 32, (50, 44))}


def test_bounds_of_layers_that_are_lifted_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = gentle(3, 64, 3)
    assert layer.way((50, 44)) == "lifted"
    tiled = layer.rounding_units((1, 3, 50, 44))
    monkeypatch.setattr(budget, "TILED_BYTES", 10**9)
    assert tiled >= layer.rounding_units((1, 3, 50, 44))


def test_layers_of_other_sources_and_autocast() -> None:
    class Unscaled(CayleyConv2d):
        def sources(self) -> tuple[Tensor, ...]:
            return (self.weight,)

        def operator(self, size: tuple[int, int], *sources: Tensor) -> Tensor:
            return self.matrices(sources[0], size)

    assert lipschitz_bound(gentle(3, 3, 3, kind=Unscaled), (3, 50, 44)) < 1 + 1e-4
    layer = gentle(3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        bound = rounding_bound(layer, (3, 50, 44), 1.0)
    assert bound == rounding_bound(gentle(3, 3, 3), (3, 50, 44), 1.0)
    assert layer.way((50, 44)) == "tiled"


def test_an_edited_weight_changes_the_tiles() -> None:
    layer, x = gentle(3, 3, 3), torch.randn(1, 3, 50, 44)
    before = layer(x)
    with torch.no_grad():
        layer.weight[0, 1, 1, 1] += 1
    assert not torch.allclose(before, layer(x), atol=1e-3)
    torch.testing.assert_close(layer(x), exact(layer, x), atol=2e-6, rtol=0)


def test_bounds_of_a_model_with_tiles() -> None:
    layer = gentle(3, 3, 3)
    model, x = torch.nn.Sequential(layer, torch.nn.Flatten()).eval(), torch.rand(1, 3, 50, 44)
    assert 1 - 1e-6 <= lipschitz_bound(model, x.shape[1:]) < 1 + 1e-4
    error = model(x).double() - layer.in_double()(x.double()).flatten(1)
    assert 0 < error.norm() < rounding_bound(model, x.shape[1:], float(x.norm()))
