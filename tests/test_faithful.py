"""What a module may be without losing its bound: everything else that could change what it computes is refused."""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from orthoconv import lipschitz_bound, register_rule
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin
from orthoconv.testing import dense_matrix


class ByPartial(nn.Linear):
    forward = partialmethod(lambda self, factor, x: factor * nn.functional.linear(x, self.weight), 5.0)


class Fivefold(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return 5 * super().__call__(x)


class MixinBehind(nn.Linear, Fivefold):
    """Its mixin comes after nn.Linear, and before nn.Module."""


class MixinBefore(Fivefold, nn.Linear):
    pass


class Descriptor:
    def __get__(self, owner: Any, cls: Any = None) -> Callable[[Tensor], Tensor]:
        return lambda x: 5 * x


class ByDescriptor(nn.Linear):
    forward = Descriptor()


class ByCallable(CayleyConv2d):
    geometry_type = type("Loud", (CayleyConv2d.geometry_type,), {"apply_blocks": lambda *a, **k: 5 * a[1]})


class ByConstant(CayleyConv2d):
    """A constant that the base reads for what it computes."""

    transposed = True


@pytest.mark.parametrize("cls", [ByPartial, MixinBehind, MixinBefore, ByDescriptor])
def test_classes_that_compute_something_else(cls: type[nn.Linear]) -> None:
    with pytest.raises(TypeError, match=rf"no rule for .*{cls.__name__}, at"):
        lipschitz_bound(nn.Sequential(cls(3, 3)), (3,))


@pytest.mark.parametrize("cls", [ByCallable, ByConstant])
def test_layers_whose_subclass_changes_what_they_read(cls: type[CayleyConv2d]) -> None:
    with pytest.raises(TypeError, match=rf"no rule for .*{cls.__name__}, at"):
        lipschitz_bound(cls(4, 4, 1), (4, 4, 4))


class WithConstants(nn.Linear):
    """A subclass with a name, an annotation and a note."""

    note: str = "mine"
    version = (1, 2)

    def __init__(self, n: int) -> None:
        super().__init__(n, n)
        self.history: list[Any] = [print]

    def extra_repr(self) -> str:
        return self.note


def test_harmless_subclasses_keep_their_bound() -> None:
    layer = WithConstants(3)
    assert lipschitz_bound(layer, (3,)) == pytest.approx(torch.linalg.matrix_norm(layer.weight, 2).item(), rel=1e-6)
    compiled = CayleyLinear(3, 3)
    compiled.compile(backend="eager")
    assert lipschitz_bound(compiled, (3,)) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("layer", "name", "shape"),
    [
        (nn.Identity(), "forward", (3,)),
        (nn.Identity(), "_call_impl", (3,)),
        (nn.Identity(), "_compiled_call_impl", (3,)),
        (nn.Identity(), "_wrapped_call_impl", (3,)),
        (nn.Conv2d(2, 2, 3), "_conv_forward", (2, 4, 4)),
        (CayleyLinear(3, 3), "apply_matrix", (3,)),
        (CayleyLinear(3, 3), "cached_operator", (3,)),
        (CayleyConv2d(2, 2, 3), "convolve", (2, 4, 4)),
    ],
)
def test_methods_replaced_on_the_instance(layer: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    assert lipschitz_bound(layer, shape) < 5
    setattr(layer, name, lambda *args, **options: 5 * args[0])
    with pytest.raises(TypeError, match=f"no rule for the own {name} of Sequential.0"):
        lipschitz_bound(nn.Sequential(layer), shape)


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = super().__torch_function__(f, types, args, kwargs)
        return 5 * value.as_subclass(Tensor) if f is nn.functional.linear else value


class MakeLoud(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return W.as_subclass(Loud)


def test_weights_of_a_tensor_subclass() -> None:
    layer, parametrized = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
    layer.weight = nn.Parameter(torch.eye(3).as_subclass(Loud))
    assert torch.equal(layer(torch.ones(1, 3)), torch.full((1, 3), 5.0))
    nn.utils.parametrize.register_parametrization(parametrized, "weight", MakeLoud())
    for bad in (layer, parametrized):
        with pytest.raises(TypeError, match=r"type Loud of Linear.weight|Loud of ParametrizedLinear.weight"):
            lipschitz_bound(bad, (3,))


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_all_modules(register: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Flatten(), MaxMin())
    handle = register(lambda module, inputs, *output: 5 * output[0] if output else (5 * inputs[0],))
    try:
        with pytest.raises(TypeError, match="hooks of all modules"):
            lipschitz_bound(model, (4,))
    finally:
        handle.remove()
    assert lipschitz_bound(model, (4,)) == 1


def test_softplus_has_no_bound_where_its_jump_shows() -> None:
    def steepest(layer: nn.Module) -> float:
        x = torch.tensor([layer.threshold], dtype=torch.float64)
        up = torch.nextafter(x, x + 1)
        return float((layer(up) - layer(x)).abs() / (up - x))

    assert steepest(nn.Softplus()) > 1e5
    with pytest.raises(TypeError, match="threshold from 40 to 80 in place of torch's 20"):
        lipschitz_bound(nn.Softplus(), (3,))
    for threshold in (40.0, 80.0):
        layer = nn.Softplus(threshold=threshold)
        assert steepest(layer) <= 1
        assert lipschitz_bound(layer, (3,)) == 1
        assert layer(torch.tensor(threshold - 1e-3)).isfinite()


def test_a_rule_for_a_mixin_of_ones_own_is_believed() -> None:
    class Known(Fivefold):
        def forward(self, x: Tensor) -> Tensor:
            return x

    register_rule(Known, lipschitz=5.0)
    assert lipschitz_bound(Known(), (3,)) == 5
    assert torch.equal(dense_matrix(Known(), (3,)), 5 * torch.eye(3))
