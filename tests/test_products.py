"""Products of two matrices by oneDNN, forced on small ones, against float64 and against torch's own."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import orthoconv
from orthoconv import budget, products
from orthoconv.linalg import bjorck_linear, cayley_linear, gram, gram_factor, lower_gram, polar_linear, reflect
from orthoconv.nn import LOTConv2d, PolarLinear, SLLLinear, linear_methods
from orthoconv.nn.methods import find_layer
from orthoconv.planes import plane
from orthoconv.products import dense, is_faster, product
from orthoconv.train.muon import polar_direction

pytestmark = pytest.mark.skipif(products._onednn is None, reason="this torch has no oneDNN")
EPS = torch.finfo(torch.float32).eps
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda A: A.contiguous(),
    "columns": lambda A: A.mT.contiguous().mT,
    "rows apart": lambda A: F.pad(A, (3, 2))[:, 3:-2],
    "columns apart": lambda A: F.pad(A.mT, (3, 2))[:, 3:-2].mT,
    "every other": lambda A: A.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "one row": lambda A: A[:1].expand(A.shape),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """All products by oneDNN, however small; and the matrices that it was given, none of which has gaps."""
    found: list[tuple[Tensor, Tensor]] = []
    onednn = products._onednn

    def recorded(A: Tensor, B: Tensor, *others: object) -> Tensor:
        found.append((A, B))
        result: Tensor = onednn(A, B, *others)
        return result

    monkeypatch.setattr(budget, "ONEDNN_PRODUCTS", 0)
    monkeypatch.setattr(products, "_onednn", recorded)
    yield found
    assert all(A.is_contiguous() or A.mT.is_contiguous() for pair in found for A in pair)


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_it_is_the_product_whatever_the_layout(calls: list[object], left: str, right: str) -> None:
    A, B = LAYOUTS[left](torch.randn(17, 40)), LAYOUTS[right](torch.randn(40, 23))
    exact, bound = A.double() @ B.double(), 40 * EPS * (A.abs() @ B.abs())
    assert bool(((product(A, B) - exact).abs() <= bound).all())
    assert not bool(((product(A + 0.01, B) - exact).abs() <= bound).all())
    assert len(calls) == 2


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_first_and_second_derivatives_are_those_of_torch(calls: list[object], needed: tuple[bool, bool]) -> None:
    A, B = torch.randn(9, 10), torch.randn(10, 12)
    wanted = [t.requires_grad_() for t, need in zip((A, B), needed, strict=True) if need]
    found = []
    for multiply in (product, torch.matmul):
        first = torch.autograd.grad(multiply(A, B).pow(3).sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        found.append((*first, *second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.detach().abs().max()))
    assert len(calls) >= 2


def test_a_gradient_is_laid_out_as_its_matrix(calls: list[object]) -> None:
    x, W = torch.randn(20, 16), torch.randn(12, 16, requires_grad=True)
    for rows in (x, x.clone().requires_grad_()):
        (grad,) = torch.autograd.grad(product(rows, W.mT).sum(), W)
        assert grad.is_contiguous()
    assert len(calls) >= 4


def test_what_the_gradient_does_not_need_may_be_overwritten(calls: list[object]) -> None:
    """As with torch's product: a layer after it works in place on the input, if the matrix is fixed."""
    W, x = torch.randn(12, 16), torch.randn(20, 16, requires_grad=True)
    h = x * 1
    y = product(h, W.mT)
    h.relu_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, W.sum(0).expand(20, 16))
    z = torch.randn(64, 16, 4, 4, requires_grad=True) * 1
    total = z
    total += LOTConv2d(16, 16, 3)(z)
    total.sum().backward()
    h = x * 1
    y = product(h, W.mT.clone().requires_grad_())
    h.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert calls


def test_torch_multiplies_what_onednn_is_not_asked_to(calls: list[object]) -> None:
    A = torch.randn(10, 10)
    pairs = [(A.double(), A.double()), (A[None], A), (A, A[0]), (A.to("meta"), A.to("meta")), (A.to_sparse(), A)]
    pairs += [(A[:, :0], A[:0]), (A[:0], A), (A, A[:, :1])]
    for left, right in pairs:
        assert not is_faster(left, right)
        assert product(left, right).shape == (left @ right).shape
    many = A.expand(3, 10, 10)
    torch.testing.assert_close(torch.func.vmap(product)(many, many), (A @ A).expand(3, 10, 10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        product(A, A)
    assert calls == []
    product(A, A)
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(A, A[:3])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_layers_are_traced_as_before(calls: list[object]) -> None:
    """With a batch of any size, for torch.export, and with torch.jit.trace."""
    batch = torch.export.Dim("b")
    for layer in (PolarLinear(16, 12), orthoconv.export(nn.Sequential(SLLLinear(16, 12)), (16,))):
        model, x = layer.eval().requires_grad_(False), torch.randn(9, 16)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
        torch.testing.assert_close(program.module()(torch.randn(5, 16)).shape, torch.Size([5, 12]))
        torch.testing.assert_close(program.module()(x), model(x))
        torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))  # type: ignore[no-untyped-call]
    assert calls


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ONEDNN_PRODUCTS", 1000)
    monkeypatch.setattr(products, "_onednn", lambda *_: torch.ones(()))
    assert product(torch.zeros(9, 10), torch.zeros(10, 11)).shape == (9, 11)
    assert product(torch.zeros(10, 10), torch.zeros(10, 10)).shape == ()


def test_a_matrix_is_copied_only_for_onednn(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    A = torch.randn(16, 18)
    assert dense(A) is A
    assert dense(A.mT).data_ptr() == A.data_ptr()
    assert dense(A[:, 2:]).is_contiguous()
    assert dense(A.double()[:, 2:]).stride() == (18, 1)
    monkeypatch.setattr(budget, "ONEDNN_PRODUCTS", math.inf)
    assert dense(A[:, 2:]).stride() == (18, 1)


def _reflected(x: Tensor, V: Tensor) -> Tensor:
    L = gram_factor(V.mT)
    assert L is not None
    return reflect(x, V.mT, L, 400)


def _transformed(x: Tensor, size: int) -> Tensor:
    """A function of the coefficients of 12 images of so many pixels a side."""
    p = plane((size, size), x.dtype, x.device)
    images = x.flatten()[: 12 * size * size].view(3, 4, size, size)
    return p.invert(p.transform(images).pow(2))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cayley_linear": lambda x, V: cayley_linear(x, V, V.detach().norm()),
    "bjorck_linear": bjorck_linear,
    "polar_linear": polar_linear,
    "reflect": _reflected,
    "MatrixPlane": lambda x, V: _transformed(x, 8),
    "AxesPlane": lambda x, V: _transformed(x, 16),
    "gram": lambda x, V: gram(V),
    "lower_gram": lambda x, V: lower_gram(V[:, 20:]),
    "muon": lambda x, V: polar_direction(V),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_matrices_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    x, V = torch.randn(70, 520, requires_grad=True), torch.randn(300, 520, requires_grad=True)

    def results() -> list[Tensor]:
        y = FUNCTIONS[name](x, V)
        gradients = torch.autograd.grad(y.square().sum() + y.sum(), (x, V), allow_unused=True)
        return [y, *(g for g in gradients if g is not None)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "ONEDNN_PRODUCTS", math.inf)
        expected = results()
    calls = request.getfixturevalue("calls")
    for found, theirs in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-4 * float(theirs.detach().abs().max()))
    assert calls


@pytest.mark.parametrize("name", sorted({*linear_methods()} - {"plain"}))
def test_layers_keep_their_promise(calls: list[object], name: str) -> None:
    """What training computes is what eval mode computes, and no norm grows."""
    layer = find_layer(name, "linear")(160, 144)
    x = torch.randn(150, 160)
    y = layer.train()(x)
    torch.testing.assert_close(y, layer.eval()(x), rtol=0, atol=1e-4 * float(y.detach().abs().max()))
    if layer.singular_values_for((160,)) is not None and layer.promise is not None:
        matrix = (layer(torch.eye(160)) - layer(torch.zeros(1, 160))).detach().double()
        values = torch.linalg.svdvals(matrix)
        assert float(values[0]) <= 1 + 2e-6 * 160**0.5
        assert layer.promise != "orthogonal" or float(values[-1]) >= 1 - 2e-6 * 160**0.5
    assert calls


def test_gradients_of_weights_of_any_scale() -> None:
    """The gradient of the polar factor is as exact for tiny and for huge weights."""
    W, x = torch.linalg.qr(torch.randn(260, 140))[0].mT, torch.randn(20, 260)
    for scale in (1e-13, 1.0, 1e14, 1e16):
        found = []
        for dtype in (torch.float32, torch.float64):
            V = (W + 0.01 * torch.eye(140, 260)).mul(scale).to(dtype).requires_grad_()
            (grad,) = torch.autograd.grad(polar_linear(x.to(dtype), V).sin().sum(), V)
            found.append(scale * grad.double())
        assert float((found[0] - found[1]).norm() / found[1].norm()) < 1e-5
