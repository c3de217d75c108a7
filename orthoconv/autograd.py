"""One scaffold for functions whose gradient is written by hand."""

__all__ = ["Tensors", "gradients_of", "with_gradient"]

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from orthoconv.tracing import full_precision, is_eager

Tensors = tuple[Tensor | None, ...]
_TORCH_TYPES = (Tensor, nn.Parameter)
Forward = Callable[..., tuple[Tensor, tuple[Tensor | None, ...]]]
Backward = Callable[[Tensor, Sequence[bool], Any, Any], Tensors]


def with_gradient(
    inputs: Tensors,
    ordinary: Callable[..., Tensor],
    forward: Forward,
    backward: Backward,
    *,
    keep_inputs: bool = True,
    restore: Callable[[Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """Compute `ordinary(*inputs)` by `forward`, with the gradient that `backward` computes.

    Both are used in eager mode only. Where torch traces or transforms, and for second derivatives, torch differentiates
    `ordinary`. Autocast touches neither direction.

    Arguments:
        inputs: Tensors, or None.
        ordinary: Differentiable function of the inputs.
        forward: Function of the inputs; returns the same value, and tensors to keep for the backward pass.
        backward: Function of (gradient of the value, whether each input needs its gradient, inputs, kept tensors);
            returns a gradient or None for each input.
        keep_inputs: If False, `backward` gets no inputs, and torch differentiates `backward` for second derivatives:
            for functions that are piecewise linear, which need not keep their input.
        restore: Function of the kept tensors that computes the first input again. That is then not kept: `backward`
            gets zeros of its shape instead, and only a second derivative computes it again.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = with_gradient((x,), torch.exp, lambda x: (x.exp(), (x.exp(),)), lambda g, need, xs, kept: (g * kept[0],))
    >>> torch.autograd.grad(y.sum(), x)[0]
    tensor([2.7183, 2.7183])
    """
    if not is_eager(*(t for t in inputs if t is not None)):
        return ordinary(*inputs)
    if not torch.is_grad_enabled():
        return forward(*inputs)[0]
    saving = nullcontext() if restore is None or not _saves_as_usual() else _without_first(inputs, restore)
    with saving:
        value: Tensor = _WithGradient.apply(ordinary if keep_inputs else None, forward, backward, *inputs)
    return value


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ordinary: Callable[..., Tensor] | None, forward: Forward, backward: Backward, *inputs: Tensor | None
    ) -> Tensor:
        value, kept = forward(*inputs)
        saved = () if ordinary is None else inputs
        ctx.ordinary, ctx.own, ctx.count = ordinary, backward, len(saved)
        ctx.save_for_backward(*saved, *kept)
        return _no_view(value, (*inputs, *kept))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        inputs, kept = saved[: ctx.count], saved[ctx.count :]
        with full_precision(grad):
            if torch.is_grad_enabled() and ctx.ordinary is not None:  # for a second derivative
                return None, None, None, *gradients_of(ctx.ordinary, grad, needed, inputs)
            return None, None, None, *ctx.own(grad, needed, inputs, kept)


def _saves_as_usual() -> bool:
    """Whether torch keeps what is saved, and no checkpoint or the like decides; False if torch does not say."""
    names = "_top_saved_tensors_default_hooks", "_saved_tensors_hooks_is_enabled"
    hooks, enabled = (getattr(torch._C._autograd, name, None) for name in names)
    return hooks is not None and hooks(True) is None and enabled is not None and enabled()


def _without_first(inputs: Tensors, restore: Callable[[Sequence[Tensor]], Tensor]) -> saved_tensors_hooks:
    """Let torch save all tensors except the first one it is given; its place in the graph is saved all the same.

    Tensors are saved in the order of `_WithGradient`: the inputs, then what is kept. With such hooks torch does not
    look for edits, so `unpack` does.
    """
    first, *others = (t for t in inputs if t is not None)
    zeros = first.detach().new_zeros(()).expand(first.shape)  # takes no memory
    saved: list[tuple[Tensor | None, int]] = []

    def pack(t: Tensor) -> tuple[Tensor | None, int]:
        saved.append((t if saved else None, t._version))
        return saved[-1]

    def unpack(one: tuple[Tensor | None, int]) -> Tensor:
        t, version = one
        if t is None:
            kept = [t for t, _ in saved[1 + len(others) :] if t is not None]
            return restore(kept) if torch.is_grad_enabled() else zeros
        if t._version != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(t.shape)} that a gradient needs was modified by an inplace operation after "
                f"the forward pass; clone it first"
            )
        return t

    return saved_tensors_hooks(pack, unpack)


def _no_view(value: Tensor, others: Tensors) -> Tensor:
    """Return the value as a tensor of its own, which a layer after it may overwrite: torch forbids that of a view.

    Memory that an input or a kept tensor has, too, is copied: torch would not see that it was overwritten.
    """
    if type(value) is not Tensor or not value._is_view():
        return value
    storages = {t.untyped_storage().data_ptr() for t in others if t is not None and type(t) in _TORCH_TYPES}
    return value.clone() if value.untyped_storage().data_ptr() in storages else value.data


def gradients_of(f: Callable[..., Tensor], grad: Tensor, needed: Sequence[bool], inputs: Tensors) -> Tensors:
    """Differentiate f(*inputs) by torch; return the gradients that are needed, None for the others.

    Each input counts as independent of the others, also where one was computed from another: that path belongs to the
    graph outside.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        apart = [t if t is None else t.view_as(t) for t in inputs]  # none of them is an ancestor of another
        value = f(*apart)
    wanted = [t for t, need in zip(apart, needed, strict=True) if need and t is not None]
    gradients = iter(torch.autograd.grad(value, wanted, grad, create_graph=create_graph))
    return tuple(next(gradients) if need else None for need in needed)
