"""What torch is about to do with tensors: trace or transform them, lower their precision, differentiate again."""

__all__ = [
    "calls",
    "full_precision",
    "in_eval_mode",
    "in_full_precision",
    "is_concrete",
    "is_eager",
    "is_forward_mode",
    "pull_back",
    "replace_modules",
]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def is_concrete(*tensors: Tensor) -> bool:
    """Whether the tensors have entries to look at and to write to, and nothing else.

    They have not under torch.compile and torch.func; with forward-mode derivatives, they have something else.

    >>> is_concrete(torch.zeros(2)), is_concrete(torch.zeros(2, device="meta"))
    (True, False)
    """
    if torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(t.is_meta or wrapped(t) or _has_tangent(t) for t in tensors)


def is_eager(*tensors: Tensor) -> bool:
    """Whether, besides, no transform of torch.func is under way, on other tensors."""
    return is_concrete(*tensors) and torch._C._functorch.peek_interpreter_stack() is None


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives are taken, as jacfwd does: of functions with a backward pass they are not found.

    A function that had a rule for them, too, could not be compiled.
    """
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Context in which autocast leaves operations on the device of `x` alone."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def in_full_precision(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """A backward pass that autocast leaves alone, as it did the forward pass: some people call both inside of it."""

    @wraps(backward)
    def wrapped(ctx: Any, grad: Tensor) -> Any:
        with full_precision(grad):
            return backward(ctx, grad)

    return wrapped


def pull_back(
    y: Tensor, inputs: Sequence[Tensor | None], wanted: Sequence[bool], grad: Tensor, *, create_graph: bool = True
) -> tuple[Tensor | None, ...]:
    """Gradients of those `inputs` of `y` that are wanted, by differentiating `y`; None for the others.

    A function with a backward pass of its own calls it where a second derivative is wanted, on its ordinary form.

    >>> x = torch.ones(2, requires_grad=True)
    >>> pull_back(3 * x, (x, None), (True, False), torch.ones(2), create_graph=False)
    (tensor([3., 3.]), None)
    """
    needed = [t for t, want in zip(inputs, wanted, strict=True) if want and t is not None]
    found = iter(torch.autograd.grad(y, needed, grad, create_graph=create_graph))
    return tuple(next(found) if want else None for want in wanted)


def _has_tangent(t: Tensor) -> bool:
    """Whether a forward-mode derivative is taken along `t`, outside torch.func."""
    return is_forward_mode() and forward_ad.unpack_dual(t).tangent is not None


def replace_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the place of some of those inside `model`, wherever they stand."""
    names = dict(model.named_modules(remove_duplicate=False))
    for name, module in names.items():
        if name and module in others:
            parent, _, last = name.rpartition(".")
            setattr(names[parent], last, others[module])


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Context in which `model` is in eval mode; after it each of its modules is in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def calls(model: nn.Module, x: Tensor) -> list[tuple[str, nn.Module, Tensor]]:
    """The modules without parts, but for parametrizations, that a forward pass calls: name, module, input, in order.

    >>> [(name, y.shape) for name, _, y in calls(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.zeros(1, 2))]
    [('0', torch.Size([1, 2])), ('1', torch.Size([1, 3]))]
    """
    found: list[tuple[str, nn.Module, Tensor]] = []
    leaves = {
        m: name for name, m in model.named_modules() if {k for k, _ in m.named_children()} <= {"parametrizations"}
    }

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            found.append((leaves[module], module, inputs[0].detach()))

    hooks = [module.register_forward_pre_hook(look) for module in leaves]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found
