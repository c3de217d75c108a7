"""Certificates of models that `torch.compile` made: their originals are bounded, and what they compute is used."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from orthoconv import certify, export, in_double, lipschitz_bound, verify
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which torch.compile does itself


@pytest.fixture(autouse=True)
def _compile_afresh() -> Iterator[None]:
    """Forget what other tests have compiled, which one of these fails after on torch 2.6."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network() -> nn.Sequential:
    body = nn.Sequential(CayleyConv2d(1, 2, 3), MaxMin(), nn.Flatten())
    return nn.Sequential(body, CayleyLinear(32, 3)).eval()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiled_model_is_certified_as_what_it_was_made_from(whole: bool) -> None:
    model, x = network(), torch.rand(4, 1, 4, 4)
    labels = model(x).argmax(1)
    expected, bound = certify(model, [(x, labels)]), lipschitz_bound(model, (1, 4, 4))
    fast = compiled(model) if whole else nn.Sequential(compiled(model[0]), model[1])
    found = certify(fast, [(x, labels)])
    assert found.head == "pairwise"
    assert lipschitz_bound(fast, (1, 4, 4)) == found.lipschitz == bound
    torch.testing.assert_close(found.radius, expected.radius, rtol=1e-4, atol=1e-6)
    checked = verify(fast, x, 1.0)
    assert checked.faults == []
    assert [layer.kind for layer in checked.layers] == ["CayleyConv2d", "CayleyLinear"]
    torch.testing.assert_close(in_double(fast)(x.double()), model(x).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(export(fast, (1, 4, 4))(x), model(x), rtol=0, atol=1e-5)
    assert (fast if whole else fast[0])._orig_mod is (model if whole else model[0])


def test_layers_of_torch_that_are_compiled_by_themselves() -> None:
    layer = nn.Linear(4, 4)
    assert lipschitz_bound(compiled(layer), (4,)) == lipschitz_bound(layer, (4,))


def test_compiled_models_that_do_something_else() -> None:
    model = compiled(network())
    model.forward = lambda x: 3 * x
    with pytest.raises(TypeError, match="no rule for the own forward of OptimizedModule"):
        lipschitz_bound(model, (1, 4, 4))
    model = compiled(network())
    model.register_forward_hook(lambda module, inputs, output: 3 * output)
    with pytest.raises(TypeError, match="forward hooks of"):
        lipschitz_bound(model, (1, 4, 4))
    model = compiled(nn.Sequential(nn.GELU()))
    with pytest.raises(TypeError, match=r"no rule for .*GELU, at OptimizedModule\.0"):
        lipschitz_bound(model, (4,))
