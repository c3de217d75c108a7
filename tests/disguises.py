"""Disguises: what may be done to a part of a model so that it no longer computes what its class says, or still does."""

import inspect
import random
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize, spectral_norm

Undo = Callable[[], None]
Disguise = Callable[[random.Random, nn.Module], Undo | None]
FACTORS = (3.0, 0.3, -2.0)


def scaled(value: Any, factor: float) -> Any:
    """Return a tensor, or each tensor of a tuple, times a factor; leave other values alone."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(scaled(v, factor) for v in value)
    return factor * value if isinstance(value, Tensor) and value.is_floating_point() else value


def own_methods(kind: type[nn.Module]) -> list[str]:
    """Names of the methods that a class has before those of nn.Module."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = sorted({name for cls in classes for name in vars(cls) if not name.startswith("__")})
    return [name for name in names if inspect.isfunction(getattr(kind, name))]


def override(r: random.Random, part: nn.Module) -> None:
    """Give a part a subclass, one method of which returns a multiple."""
    kind, factor = type(part), r.choice(FACTORS)
    name = r.choice(["forward", *own_methods(kind)])
    original, static = getattr(kind, name), isinstance(inspect.getattr_static(kind, name), staticmethod)

    def method(*args: Any, **kwargs: Any) -> Any:
        return scaled(original(*args, **kwargs), factor)

    part.__class__ = type(f"Other{kind.__name__}", (kind,), {name: staticmethod(method) if static else method})


def own_attribute(r: random.Random, part: nn.Module) -> None:
    """Give a part an attribute in place of one of its methods."""
    factor, name = r.choice(FACTORS), r.choice(["forward", "_call_impl", *own_methods(type(part))])
    original = getattr(part, name)
    object.__setattr__(part, name, lambda *args, **kwargs: scaled(original(*args, **kwargs), factor))


def partial_forward(r: random.Random, part: nn.Module) -> None:
    """Give a part a subclass whose forward is a partialmethod."""
    kind, factor = type(part), r.choice(FACTORS)
    forward = partialmethod(lambda self, by, *xs: scaled(kind.forward(self, *xs), by), factor)
    part.__class__ = type(f"Partial{kind.__name__}", (kind,), {"forward": forward})


class Loud(nn.Module):
    """A mixin that changes every call, from behind the class that it is mixed into."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(super().__call__(*args, **kwargs), 3.0)


def mixin(r: random.Random, part: nn.Module) -> None:
    part.__class__ = type(f"Loud{type(part).__name__}", (type(part), Loud), {})


class Tripled(Tensor):
    """A tensor that is three times itself wherever it is used by a convolution or a product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        named = getattr(func, "__name__", "") in ("linear", "conv2d", "matmul", "__matmul__")
        return 3 * result.as_subclass(Tensor) if named else result

    def __deepcopy__(self, memo: Any) -> "Tripled":
        return self.as_subclass(Tensor).clone().as_subclass(Tripled)


def tensor_type(r: random.Random, part: nn.Module) -> None:
    names = [name for name, p in part._parameters.items() if p is not None]
    if names:
        name = r.choice(names)
        part._parameters[name] = part._parameters[name].detach().as_subclass(Tripled)


class Triple(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x


def parametrized(r: random.Random, part: nn.Module) -> None:
    if isinstance(getattr(part, "weight", None), Tensor) and not parametrize.is_parametrized(part):
        parametrize.register_parametrization(part, "weight", Triple())


def old_norm(r: random.Random, part: nn.Module) -> None:
    if isinstance(part, nn.Conv2d | nn.Linear) and not parametrize.is_parametrized(part):
        spectral_norm(part).eval()


def hook(r: random.Random, part: nn.Module) -> None:
    factor = r.choice(FACTORS)
    if r.random() < 0.5:
        part.register_forward_hook(lambda module, inputs, output: scaled(output, factor))
    else:
        part.register_forward_pre_hook(lambda module, inputs: scaled(inputs, factor))


def global_hook(r: random.Random, part: nn.Module) -> Undo:
    """Register a hook for all modules, which changes those of one class."""
    kind = type(part)
    if r.random() < 0.5:
        return register_module_forward_hook(
            lambda module, inputs, output: scaled(output, 3.0) if type(module) is kind else None
        ).remove
    return register_module_forward_pre_hook(
        lambda module, inputs: scaled(inputs, 3.0) if type(module) is kind else None
    ).remove


@torch.no_grad()
def buffers(r: random.Random, part: nn.Module) -> None:
    """Change statistics as a state dict might."""
    for buffer in part.buffers():
        if buffer.is_floating_point():
            buffer.mul_(r.choice([-1.0, 0.0, 1e-6, 10.0]))


def harmless(r: random.Random, part: nn.Module) -> None:
    kind = type(part)
    members: list[dict[str, Any]] = [{}, {"extra_repr": lambda self: "mine"}, {"note": 3, "__doc__": "Mine."}]
    part.__class__ = type(f"My{kind.__name__}", (kind,), r.choice(members))
    part.register_full_backward_hook(lambda module, grad_in, grad_out: None)


def in_place(r: random.Random, part: nn.Module) -> None:
    part.inplace = True


def training(r: random.Random, part: nn.Module) -> None:
    part.train()


DISGUISES: dict[str, Disguise] = {
    "override": override, "attribute": own_attribute, "partialmethod": partial_forward, "mixin": mixin,
    "tensor": tensor_type, "parametrized": parametrized, "spectral_norm": old_norm, "hook": hook,
    "global hook": global_hook, "buffers": buffers, "harmless": harmless, "in place": in_place, "training": training,
}  # fmt: skip


def disguise(r: random.Random, model: nn.Module) -> tuple[str, Undo]:
    """Change a random part of a model; return what was done, and how to undo what outlives the model."""
    name, part = r.choice(list(DISGUISES)), r.choice(list(model.modules()))
    undo = DISGUISES[name](r, part)
    return f"{name} of {type(part).__name__}", undo or (lambda: None)
