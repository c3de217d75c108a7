"""Whether tensors are ordinary ones, or stand for others while torch traces or transforms a function."""

__all__ = ["is_concrete", "is_eager"]

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
