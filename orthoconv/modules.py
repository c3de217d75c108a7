"""Walks through the modules of a model: swap some, look at their inputs, switch their mode."""

__all__ = [
    "compiled_from",
    "in_eval_mode",
    "leaf_inputs",
    "reduced_products",
    "replace_modules",
    "require_module",
    "require_number",
    "uncompiled",
    "zeros_for",
]

import copy
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class LeafInput(NamedTuple):
    """A leaf module, its name in the model, and one input that it got."""

    name: str
    module: nn.Module
    x: Tensor


def require_module(model: object) -> None:
    """Raise an error unless `model` is a module.

    >>> require_module("resnet18")
    Traceback (most recent call last):
    ...
    TypeError: a model must be a module (torch.nn.Module), got 'resnet18'
    """
    if isinstance(model, nn.Module):
        return
    given = f"a tensor of shape {tuple(model.shape)}" if isinstance(model, Tensor) else reprlib.repr(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        given = f"the class {model.__name__} itself; call it to make a module"
    elif isinstance(model, Mapping):
        given = f"a {type(model).__name__}; if it holds weights, give the model that has loaded them"
    raise TypeError(f"a model must be a module (torch.nn.Module), got {given}")


def require_number(name: str, value: Any) -> None:
    """Raise an error unless `value` is a number, of Python, NumPy or torch.

    >>> require_number("lipschitz", "1")
    Traceback (most recent call last):
    ...
    TypeError: lipschitz must be a number, got '1'
    """
    if isinstance(value, str) or not hasattr(value, "__float__") or getattr(value, "ndim", False):
        raise TypeError(f"{name} must be a number, got {reprlib.repr(value)}")


def replace_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Replace submodules of `model` by others, in every place where they stand."""
    names = dict(model.named_modules(remove_duplicate=False))
    for name, module in names.items():
        if name and module in others:
            parent, _, last = name.rpartition(".")
            setattr(names[parent], last, others[module])


def compiled_from(module: nn.Module) -> nn.Module | None:
    """Return what `torch.compile` made a module from; None for any other module."""
    kind = type(module)  # importing the class itself would take seconds
    made_by_torch = (kind.__module__, kind.__name__) == ("torch._dynamo.eval_frame", "OptimizedModule")
    return module._orig_mod if made_by_torch else None  # type: ignore[return-value]


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model; if `torch.compile` made it or a part of it, a copy with the originals in their places.

    >>> uncompiled(nn.ReLU())
    ReLU()
    """
    copies: dict[int, nn.Module] = {}
    for module in reversed(list(model.modules())):  # inner ones first
        if (original := compiled_from(module)) is not None:
            copies[id(module)] = copy.deepcopy(original, copies)
    return copy.deepcopy(model, copies) if copies else model


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode; afterwards give each of its modules its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def leaf_inputs(model: nn.Module, x: Tensor) -> list[LeafInput]:
    """Run the model; return name, module and input of each leaf module, in the order of the calls.

    A leaf has no submodules, or only parametrizations.

    >>> [(name, y.shape) for name, _, y in leaf_inputs(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2))]
    [('0', torch.Size([1, 2])), ('1', torch.Size([1, 3]))]
    """
    seen: list[LeafInput] = []
    leaves = {
        m: name for name, m in model.named_modules() if {k for k, _ in m.named_children()} <= {"parametrizations"}
    }

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            seen.append(LeafInput(leaves[module], module, inputs[0].detach()))

    hooks = [module.register_forward_pre_hook(record) for module in leaves]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def zeros_for(model: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Return a batch of one zero input of that shape, with the dtype and device of the model's tensors."""
    if not isinstance(input_shape, Sequence) or any(not isinstance(n, Integral) or n < 0 for n in input_shape):
        given = (
            f"a tensor of shape {tuple(input_shape.shape)}" if isinstance(input_shape, Tensor) else repr(input_shape)
        )
        raise ValueError(f"input_shape must be the shape of one input, such as (3, 32, 32), got {given}")
    like = next((t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), torch.empty(0))
    return torch.zeros(1, *map(int, input_shape), dtype=like.dtype, device=like.device)


@contextmanager
def reduced_products(model: nn.Module) -> Iterator[nn.Module]:
    """Let linear layers of this library that are in training mode multiply in bfloat16 inside the context.

    Their matrices are still computed in float32. Their outputs are bfloat16; a layer after them takes those only under
    autocast. `train.fit` does both for `Recipe(precision="bf16")`. Layers in eval mode and in float64 stay as they are.
    A layer takes part by an attribute `reduced` of its class, which is False outside.

    >>> with reduced_products(nn.Identity()) as model:
    ...     y = model(torch.ones(2))
    """
    layers = [m for m in model.modules() if getattr(m, "reduced", None) is False]
    for layer in layers:
        layer.reduced = True  # type: ignore[assignment]
    try:
        yield model
    finally:
        for layer in layers:
            del layer.reduced
