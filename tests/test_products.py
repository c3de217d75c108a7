"""Products of two matrices by oneDNN, forced on small ones, against float64 and against torch's own."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv import budget, products
from orthoconv.linalg import bjorck_linear, cayley_linear, gram, lower_gram, polar_linear
from orthoconv.nn import linear_methods
from orthoconv.nn.methods import find_layer
from orthoconv.products import dense, product
from orthoconv.train.muon import polar_direction

pytestmark = pytest.mark.skipif(products._onednn is None, reason="this torch has no oneDNN")
EPS = torch.finfo(torch.float32).eps
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda A: A.contiguous(),
    "columns": lambda A: A.mT.contiguous().mT,
    "rows apart": lambda A: F.pad(A, (3, 2))[:, 3:-2],
    "columns apart": lambda A: F.pad(A, (0, 0, 3, 2))[3:-2].mT.contiguous().mT[:, :],
    "every other": lambda A: A.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """All products by oneDNN, however small; and the matrices that it was given."""
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
    assert not bool(((product(A, B.flip(0)) - exact).abs() <= bound).all())
    assert len(calls) == 2


def test_first_and_second_derivatives_are_those_of_torch(calls: list[object]) -> None:
    A, B = torch.randn(5, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    found = []
    for multiply in (product, torch.matmul):
        first = torch.autograd.grad(multiply(A, B).pow(3).sum(), (A, B), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (A, B))
        found.append((*first, *second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert len(calls) >= 3


def test_torch_multiplies_what_onednn_is_not_asked_to(calls: list[object]) -> None:
    A = torch.randn(4, 4)
    others = [(A.double(), A.double()), (A[None], A), (A, A[0]), (A.to("meta"), A.to("meta"))]
    for left, right in others:
        assert product(left, right).shape == (left @ right).shape
    torch.testing.assert_close(torch.func.vmap(product)(A.expand(3, 4, 4), A.expand(3, 4, 4)), (A @ A).expand(3, 4, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        product(A, A)
    assert calls == []
    product(A, A)
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        product(A, A[:3])


def test_small_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ONEDNN_PRODUCTS", 1000)
    monkeypatch.setattr(products, "_onednn", None)
    product(torch.zeros(9, 10), torch.zeros(10, 11))
    monkeypatch.setattr(products, "_onednn", lambda *_: torch.ones(()))
    assert product(torch.zeros(9, 10), torch.zeros(10, 11)).shape == (9, 11)
    assert product(torch.zeros(10, 10), torch.zeros(10, 10)).shape == ()


def test_a_matrix_is_copied_only_for_onednn(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    A = torch.randn(6, 8)
    assert dense(A) is A
    assert dense(A.mT).data_ptr() == A.data_ptr()
    assert dense(A[:, 2:]).is_contiguous()
    assert dense(A.double()[:, 2:]).stride() == (8, 1)
    monkeypatch.setattr(budget, "ONEDNN_PRODUCTS", math.inf)
    assert dense(A[:, 2:]).stride() == (8, 1)


def _results(name: str) -> list[Tensor]:
    """Value and gradients of a function that multiplies matrices of 300 x 520, and rows by them."""
    torch.manual_seed(0)
    x, V = torch.randn(70, 520, requires_grad=True), torch.randn(300, 520, requires_grad=True)
    functions: dict[str, Callable[[], Tensor]] = {
        "cayley_linear": lambda: cayley_linear(x, V, V.detach().norm()),
        "bjorck_linear": lambda: bjorck_linear(x, V),
        "polar_linear": lambda: polar_linear(x, V),
        "gram": lambda: gram(V),
        "lower_gram": lambda: lower_gram(V[:, 20:]),
        "muon": lambda: polar_direction(V),
    }
    y = functions[name]()
    needed = [t for t in (x, V) if name.endswith("linear") or t is V]
    return [y, *torch.autograd.grad(y.square().sum() + y.sum(), needed)]


@pytest.mark.parametrize("name", ["cayley_linear", "bjorck_linear", "polar_linear", "gram", "lower_gram", "muon"])
def test_functions_of_matrices_are_the_same(name: str, request: pytest.FixtureRequest) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "ONEDNN_PRODUCTS", math.inf)
        expected = _results(name)
    calls = request.getfixturevalue("calls")
    for found, theirs in zip(_results(name), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-4 * float(theirs.detach().abs().max()))
    assert calls


@pytest.mark.parametrize("name", sorted({*linear_methods()} - {"plain"}))
def test_layers_keep_their_promise(calls: list[object], name: str) -> None:
    """What training computes is what eval mode computes, and no norm grows."""
    layer = find_layer(name, "linear")(160, 144)
    x = torch.randn(150, 160)
    y = layer.train()(x)
    torch.testing.assert_close(y, layer.eval()(x), rtol=0, atol=1e-4 * float(y.detach().abs().max()))
    if layer.promise in ("orthogonal", "nonexpansive"):
        step = torch.randn_like(x)
        moved = layer(x + step) - layer(x)
        assert bool((moved.norm(dim=1) <= 1.0001 * step.norm(dim=1)).all())
    assert calls
