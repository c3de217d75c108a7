"""What torch is doing with tensors at the moment: tracing, transforming, or lowering their precision."""

__all__ = ["full_precision", "is_concrete", "is_eager", "is_forward_mode", "is_traced", "tensor_cache"]

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

P = ParamSpec("P")
T = TypeVar("T")


def is_concrete(*tensors: Tensor) -> bool:
    """Whether the tensors hold numbers that may be read and written in place.

    They do not under torch.compile, torch.export and torch.func, nor with forward-mode derivatives.

    >>> is_concrete(torch.zeros(2)), is_concrete(torch.zeros(2, device="meta"))
    (True, False)
    """
    if is_traced():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(t.is_meta or _is_intercepted(t) or wrapped(t) or _has_tangent(t) for t in tensors)


def is_eager(*tensors: Tensor) -> bool:
    """Whether the tensors are concrete, and no torch.func transform is active anywhere."""
    return is_concrete(*tensors) and torch._C._functorch.peek_interpreter_stack() is None


def is_forward_mode() -> bool:
    """Whether forward-mode derivatives are being taken, as torch.func.jacfwd does.

    They do not see through a `torch.autograd.Function` with a backward pass only.
    """
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off for operations on the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def tensor_cache(make: Callable[P, T]) -> Callable[P, T]:
    """Cache the constant tensors that `make` returns; never those made while torch traces.

    They are ordinary tensors whatever surrounds the first call: inference mode, or another default device.
    """
    cached = lru_cache(maxsize=64)(make)

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_traced():
            return make(*args, **kwargs)
        with torch.inference_mode(False), torch.device("cpu"):
            return cached(*args, **kwargs)  # type: ignore[arg-type]

    return get


def is_traced() -> bool:
    """Whether torch is tracing, or another dispatch mode is on: what is computed now may hold no numbers."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def _is_intercepted(t: Tensor) -> bool:
    """Whether `t` is of a subclass that handles operations itself, as fake tensors do."""
    return type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _has_tangent(t: Tensor) -> bool:
    """Whether a forward-mode derivative is taken along `t`, outside torch.func."""
    return is_forward_mode() and forward_ad.unpack_dual(t).tangent is not None
