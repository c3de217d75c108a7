"""Whether a module computes what its class says; what is not known to leave that alone is not trusted (decision 4)."""

__all__ = [
    "GRADIENT_MODES",
    "is_plain",
    "require_as_defined",
    "require_class_of_parametrize",
    "require_code_of_graph",
    "require_compiled",
    "require_copyable",
    "require_methods_of_class",
    "require_no_global_hooks",
    "require_replaceable",
    "runs_own_call",
]

import copy
import inspect
from abc import ABC
from collections.abc import Iterator
from typing import Any, Generic

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

_HARMLESS = {
    "__init__", "__repr__", "__str__", "extra_repr", "set_up", "reset_parameters",
    "operator", "orthogonalize", "transform", "sources",  # the bound of a layer of ours is that of what these return
    "guarantee", "depends_on_size",  # and of how it calls them
}  # fmt: skip
_BOOKKEEPING = {
    "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__slotnames__", "__signature__",
    "__constants__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__conditional_annotations__", "__firstlineno__", "__static_attributes__", "__type_params__",
    "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip
_TRUSTED = ("orthoconv.nn.", "torch.fx.graph_module")
GRADIENT_MODES = ((False, False), (True, False), (False, True))  # whether there are gradients, and inference mode
_TORCH_DEVICES = {"cpu", "cuda", "mps", "xpu", "meta"}  # other backends may have tensors of their own type


def is_plain(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a module of the class `base`, or of a subclass, leaves alone what that class computes.

    Each class that is not a base of `base` must be faithful, wherever it stands: one behind `base` may still come
    before `nn.Module`.
    """
    mro = type(module).__mro__
    return base in mro and all(_is_faithful(cls, base) for cls in mro if cls not in base.__mro__)


def _is_faithful(cls: type, base: type) -> bool:
    """Whether a class changes nothing of `base`: it is of this library, or has harmless names and new constants alone.

    A constant of a new name is something that the code of `base` does not look for.
    """
    if cls.__module__.startswith(_TRUSTED) or cls in (ABC, Generic):  # a class that `type` made of one may be of "abc"
        return True
    new = {name for name, value in vars(cls).items() if _is_constant(value) and not hasattr(base, name)}
    parametrized = {name for name, value in vars(cls).items() if _is_of_parametrize(value)}
    return vars(cls).keys() <= _HARMLESS | _BOOKKEEPING | new | parametrized


def _is_of_parametrize(value: Any) -> bool:
    """Whether a member of a class is one that torch gives to layers with parametrizations."""
    function = value.fget if isinstance(value, property) else value
    return inspect.isfunction(function) and function.__module__ == parametrize.__name__


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple)


def require_as_defined(module: nn.Module, path: str) -> None:
    """Raise an error if a module does not do what its class says: by attributes of its own, hooks, or its tensors."""
    require_methods_of_class(module, path)
    if not runs_own_call(module):
        raise TypeError(f"there is no rule for the own _compiled_call_impl of {path} ({type(module).__name__})")
    if module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(f"nobody can see what the forward hooks of {path} ({type(module).__name__}) do; remove them")
    require_steady(module, path)
    for name, tensor in _tensors(module):
        if type(tensor) not in (Tensor, nn.Parameter) and tensor.device.type in _TORCH_DEVICES:
            raise TypeError(
                f"nobody can see what the type {type(tensor).__name__} of {path}.{name} ({type(module).__name__}) "
                f"does; make it a torch.Tensor or an nn.Parameter"
            )


def require_code_of_graph(module: fx.GraphModule) -> None:
    """Raise an error if a graph runs other code than its nodes: that of an older graph, or of somebody else."""
    fresh = fx.GraphModule(module, copy.deepcopy(module.graph))
    kinds = type(module), type(fresh)
    codes, others = ({name: getattr(f, "__code__", None) for name, f in vars(kind).items()} for kind in kinds)
    if codes != others:
        raise TypeError("a graph is bounded as it runs, but its code is not that of its nodes; call recompile()")
    if type(module.graph._codegen) is not CodeGen or module.graph._codegen._body_transformer is not None:
        raise TypeError("a graph is bounded if torch alone writes its code, without on_generate_code or set_codegen")


def require_compiled(module: nn.Module, original: nn.Module, path: str) -> None:
    """Raise an error if what `torch.compile` made of a module may do something else than that module."""
    call: Any = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    if call != original.__call__ and getattr(call, "__wrapped__", None) is not original:
        raise TypeError(f"there is no rule for the own forward of {path} ({type(module).__name__})")
    if module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(f"nobody can see what the forward hooks of {path} ({type(module).__name__}) do; remove them")


def require_methods_of_class(module: nn.Module, path: str) -> None:
    """Raise an error if an attribute of the instance takes the place of a method; a copy would call the original."""
    for name in vars(module):
        if _is_code(inspect.getattr_static(type(module), name, None)):
            raise TypeError(f"there is no rule for the own {name} of {path} ({type(module).__name__})")


def _is_code(value: Any) -> bool:
    """Whether an attribute of a class is a method or another descriptor."""
    return callable(value) or hasattr(type(value), "__get__")


def runs_own_call(module: nn.Module) -> bool:
    """Whether a call of the module runs its class, or what `module.compile` made of it."""
    call: Any = vars(module).get("_compiled_call_impl")
    return call is None or getattr(call, "_torchdynamo_orig_callable", None) == module._call_impl


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a module's own tensors, parametrized ones as they are computed."""
    own = {**vars(module), **dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    if parametrize.is_parametrized(module):
        names = list(module.parametrizations)  # type: ignore[arg-type]
        own |= {name: getattr(module, name) for name in names}
    return ((name, value) for name, value in own.items() if isinstance(value, Tensor))


def require_no_global_hooks() -> None:
    """Raise an error if a hook is registered for all modules, which may change what each of them returns."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise TypeError(
            "nobody can see what the hooks of all modules do (torch.nn.modules.module.register_module_forward_hook "
            "and register_module_forward_pre_hook); remove them"
        )


def require_copyable(model: nn.Module) -> None:
    """Raise an error if a copy would leave out something: torch copies of a graph its modules and code, and no hooks.

    Hooks of all modules look at the class of a module, which may be another one in the copy.
    """
    require_no_global_hooks()
    for name, module in model.named_modules():
        if isinstance(module, fx.GraphModule):
            path = name or type(module).__name__
            made_by_torch = type(module).__module__ == fx.graph_module.__name__  # else a copy calls itself without end
            if not made_by_torch or not is_plain(module, fx.GraphModule):
                raise TypeError(
                    f"a copy leaves out what {type(module).__name__} does, at {path}, a subclass of a graph"
                )
            require_as_defined(module, path)


def require_steady(module: nn.Module, path: str) -> None:
    """Raise an error if parametrizations in eval mode make other tensors with gradients, or at the next call."""
    if not parametrize.is_parametrized(module) or any(m.training for m in module.modules()):
        return
    for name in module.parametrizations:  # type: ignore[union-attr]
        values = []
        for grad, inference in GRADIENT_MODES:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                values.append(getattr(module, name).detach())
        if not all(torch.equal(values[0], other) for other in values[1:]):
            raise TypeError(
                f"the parametrization of {path}.{name} ({type(module).__name__}) must make the same tensor at each "
                f"call, with gradients or without"
            )


def require_class_of_parametrize(module: nn.Module, path: str) -> None:
    """Raise an error if a layer with parametrizations has a class other than the one that torch made for them."""
    made = any(isinstance(value, property) and _is_of_parametrize(value) for value in vars(type(module)).values())
    if parametrize.is_parametrized(module) and not made:
        raise TypeError(
            f"a copy leaves out what {type(module).__name__} does, at {path}, a subclass of a parametrized one"
        )


def require_replaceable(module: nn.Module, method: str, path: str) -> None:
    """Raise an error if what `method` returns in place of a module would leave out something that the module does."""
    author = next(cls for cls in type(module).__mro__ if method in vars(cls))
    if not is_plain(module, author):
        kind = type(module)
        raise TypeError(
            f"{method} of {author.__name__} leaves out what {kind.__module__}.{kind.__name__} does, at {path}; "
            f"give that class a method {method} of its own"
        )
    require_as_defined(module, path)
