"""Wrappers around a model that leave alone what it computes: averages of weights, data parallelism, compilation."""

__all__ = ["unwrapped"]

import copy
from typing import Any

from torch import nn

from orthoconv.certificates.trust import require_compiled, require_methods_of_class, runs_own_call
from orthoconv.modules import require_module

_WRAPPERS = {  # by module and name of the class, and the attribute that holds the model
    ("torch.optim.swa_utils", "AveragedModel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("lightning.fabric.wrappers", "_FabricModule"): "_forward_module",
    ("lightning_fabric.wrappers", "_FabricModule"): "_forward_module",
}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers: AveragedModel, DataParallel, DistributedDataParallel, torch.compile, Fabric.

    A `forward` that the package accelerate has put before that of the class is left out of a shallow copy, too. It
    changes the precision of the computation, and not the function. So is what ``model.compile()`` has put there. A
    wrapper with hooks is refused.

    >>> inner = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(inner)) is inner
    True
    """
    require_module(model)
    kind = type(model)
    attribute = _WRAPPERS.get((kind.__module__, kind.__name__))
    if attribute is not None:
        inner = getattr(model, attribute)
        if kind.__name__ == "OptimizedModule":
            require_compiled(model, inner, kind.__name__)
        else:
            require_methods_of_class(model, kind.__name__)
        if model._forward_hooks or model._forward_pre_hooks:
            raise TypeError(f"nobody can see what the forward hooks of {kind.__name__} do; remove them")
        return unwrapped(inner) if isinstance(inner, nn.Module) else model
    return _without_compilation(_without_accelerate(model))


def _without_compilation(model: nn.Module) -> nn.Module:
    """Return the model as it was before ``model.compile()``; its parts stay the same."""
    if vars(model).get("_compiled_call_impl") is None or not runs_own_call(model):
        return model
    twin = copy.copy(model)
    twin.__dict__.pop("_compiled_call_impl", None)
    return twin


def _without_accelerate(model: nn.Module) -> nn.Module:
    """Return the model without the `forward` of its own that accelerate's `prepare` has given it."""
    own: Any = vars(model).get("forward") if isinstance(model, nn.Module) else None
    original = vars(model).get("_original_forward") if own is not None else None
    if original is None:
        return model
    if getattr(original, "__func__", None) is not type(model).forward or not _is_of_accelerate(own, original):
        return model
    twin = copy.copy(model)
    del twin.__dict__["forward"], twin.__dict__["_original_forward"]
    return twin


def _is_of_accelerate(forward: Any, original: Any) -> bool:
    """Whether each function around the original one is of accelerate, or torch's autocast."""
    function = getattr(forward, "__func__", forward)
    while function is not None and function not in (original, getattr(original, "__func__", None)):
        home = str(getattr(type(function) if not hasattr(function, "__code__") else function, "__module__", ""))
        code = getattr(getattr(function, "__code__", None), "co_filename", "")
        if (
            not home.startswith(("accelerate.", "torch.amp."))
            and "torch/amp/" not in code
            and "accelerate/" not in code
        ):
            return False
        function = getattr(function, "__wrapped__", None)
        function = getattr(function, "model_forward", function)
    return function is not None
