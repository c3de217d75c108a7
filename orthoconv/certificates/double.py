"""A float64 copy of a model that keeps the model's own operators."""

__all__ = ["in_double", "keep_parametrized"]

import copy

from torch import nn
from torch.nn.utils import parametrize

from orthoconv.certificates.trust import (
    require_class_of_parametrize,
    require_copyable,
    require_methods_of_class,
    require_replaceable,
)
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.devices import in_reach_of_double
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
