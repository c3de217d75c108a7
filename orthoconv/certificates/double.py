"""A float64 copy of a model that keeps the model's own operators."""

__all__ = ["in_double", "keep_parametrized", "require_all_double"]

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from orthoconv.certificates.own_forward import is_own
from orthoconv.certificates.trust import (
    require_class_of_parametrize,
    require_copyable,
    require_methods_of_class,
    require_replaceable,
)
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.devices import in_double_near, in_reach_of_double
from orthoconv.modules import replace_modules, uncompiled
from orthoconv.nn.reparametrized import Reparametrized


def in_double(model: nn.Module) -> nn.Module:
    """Return a copy of `model` in eval mode that computes in float64, with the operators of the model's own precision.

    It is the function that `lipschitz_bound` speaks of, to some 1e-13. ``model.double()`` is not: it would compute its
    operators again, in float64. The copy is on the model's device, or on the CPU where that device has no float64.
    A layer with hooks, or with methods that the copy would leave out, is refused.

    Arguments:
        model: Model whose modules have a rule; it is not changed.

    >>> import torch
    >>> from orthoconv.nn import CayleyLinear
    >>> model, x = CayleyLinear(8, 4).eval(), torch.rand(2, 8)
    >>> torch.dist(in_double(model)(x.double()), model(x)).item() < 1e-6
    True
    """
    model = uncompiled(unwrapped(model))
    require_copyable(model)
    for name, module in model.named_modules():
        path = name or type(module).__name__
        require_methods_of_class(module, path)
        require_class_of_parametrize(module, path)
        if isinstance(module, Reparametrized):
            require_replaceable(module, "in_double", path)
    near = in_reach_of_double(model)
    model = (copy.deepcopy(model) if near is model else near).eval().requires_grad_(False)
    for module in list(model.modules()):
        keep_parametrized(module)
    doubles: dict[nn.Module, nn.Module] = {m: m.in_double() for m in model.modules() if isinstance(m, Reparametrized)}
    replace_modules(model, doubles)
    return doubles.get(model, model).double()


def keep_parametrized(module: nn.Module) -> None:
    """Make what torch computes from parameters a parameter, as it was computed.

    torch.nn.utils.parametrize.remove_parametrizations would change the class that a copy shares with its original.
    """
    if not parametrize.is_parametrized(module):
        return
    values = {name: getattr(module, name).detach().clone() for name in module.parametrizations}  # type: ignore[union-attr]
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def require_all_double(model: nn.Module, x: Tensor) -> None:
    """Raise an error if a model in float64 rounds something to a lower precision, for one input `x`, (1, ...).

    A module with a `forward` of its own may say ``y.float()``; then the copy rounds as the model does, and their
    difference does not show it. Of the input itself, which is of the model's own precision, that changes nothing.

    Arguments:
        model: Copy of a model, which computes in float64.
        x: Input of the model.
    """
    place: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: place.append(name)

    def leave(*_: Any) -> None:
        place.pop()

    strange = {m for m in model.modules() if is_own(m) and not type(m).__module__.startswith("orthoconv.")}
    parts = [(f"{name} ({type(m).__name__})".strip() * (m in strange), m) for name, m in model.named_modules()]
    hooks = [m.register_forward_pre_hook(enter(name)) for name, m in parts]
    hooks += [m.register_forward_hook(leave) for _, m in parts]
    z = in_double_near(x).clone()
    try:
        with _Precise(place, z if x.dtype != z.dtype else None) as mode:
            model(z)
    finally:
        for hook in hooks:
            hook.remove()
    if mode.faults:
        raise TypeError(
            f"rounding is measured in float64, but {mode.faults[0]}; let it keep the precision of its input, or do "
            f"without by certify(..., rounding=False)"
        )


class _Precise(TorchFunctionMode):
    """Notes each function of float64 that returns a lower precision; an error here would be taken for another one.

    Arguments:
        place: Names of the modules that are running, the innermost last; nothing for those that are known.
        exact: A tensor of float64 that a lower precision holds without rounding, or None.
    """

    def __init__(self, place: list[str], exact: Tensor | None) -> None:
        super().__init__()
        self.place, self.exact, self.narrow, self.faults = place, exact, list[Tensor](), list[str]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if not self.place or not self.place[-1]:
            return value
        given, made = ([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in ((args, kwargs), value))
        low = [t for t in made if t.is_floating_point() and t.dtype != torch.float64]
        if not low:
            return value
        if len(given) == 1 and given[0] is self.exact and torch.equal(low[0].double(), self.exact):
            self.narrow += low
        elif any(t.dtype == torch.float64 or any(t is n for n in self.narrow) for t in given):
            self.faults.append(f"{self.place[-1]} computes {getattr(func, '__name__', func)} in {low[0].dtype}")
        return value
