"""What torch is about to do with tensors: trace or transform them, or differentiate a second time."""

__all__ = ["is_concrete", "is_eager", "pull_back"]

from collections.abc import Sequence

import torch
from torch import Tensor


def is_concrete(*tensors: Tensor) -> bool:
    """Whether the tensors have entries to look at and to write to, as they have not under torch.compile or torch.func.

    >>> is_concrete(torch.zeros(2)), is_concrete(torch.zeros(2, device="meta"))
    (True, False)
    """
    if torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(t.is_meta or wrapped(t) for t in tensors)


def is_eager(*tensors: Tensor) -> bool:
    """Whether, besides, no transform of torch.func is under way, on other tensors."""
    return is_concrete(*tensors) and torch._C._functorch.peek_interpreter_stack() is None


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
