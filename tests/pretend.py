"""A pretend accelerator: a device "acc" whose tensors are computed on the CPU, for machines that have no other.

It is torch's PrivateUse1 device. A tensor on it wraps a CPU tensor and runs every operation on that; torch's own
functions, autograd and modules see the device "acc:0". It is as strict as a GPU: an operation on tensors of two devices
is an error, and so is a generator of another device. It counts the kernels that would be launched, and the points at
which the host would wait for the device.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration as registration

from orthoconv import tracing

if not hasattr(registration, "_DummyPrivateUse1Hook"):
    pytest.skip("a device that is written in Python needs a later torch", allow_module_level=True)
NAME = "acc"
VIEWS = {  # these launch nothing
    "_conj", "_neg_view", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "expand",
    "imag", "lift_fresh", "permute", "real", "select", "slice", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "is_same_size", "set_", "chunk", "resolve_conj", "resolve_neg",
}  # fmt: skip
SYNCS = {"_local_scalar_dense", "equal", "is_nonzero", "_linalg_check_errors", "nonzero", "masked_select", "unique_dim"}
COPIES = {"_to_copy", "copy_", "_copy_from"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}  # a CPU index is moved, as on a GPU


REFUSED: set[torch.dtype] = set()  # precisions that the device does not have


class Usage(NamedTuple):
    """Kernels that were launched, and points at which the host waited, by name of the operation."""

    kernels: Counter[str]
    syncs: Counter[str]


_running: list[Usage] = []


_visible = [False]


class _Hook(registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _visible[0]


class _Backend(registration._DummyBackendModule):
    def is_available(self) -> bool:
        return _visible[0]

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class Remote(torch.Tensor):
    """A tensor on the pretend accelerator; its numbers are those of the CPU tensor `near`."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> "Remote":
        if near.dtype in REFUSED:
            raise TypeError(f"{NAME} has no {near.dtype}")
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, near: Tensor) -> None:
        self.near = near

    def __repr__(self) -> str:
        return f"{NAME}:{self.near!r}"

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(f, args, kwargs or {})


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU tensors that the arguments wrap; count it."""
    name = f.__name__.split(".")[0]
    leaves = [*_leaves(args), *_leaves(kwargs)]
    remote = any(isinstance(t, Remote) for t in leaves)
    near = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, Remote) and t.dim() > 0]
    if remote and near and name not in COPIES | INDEXED:
        raise RuntimeError(f"{f} got tensors on {NAME} and on the CPU, of shapes {[tuple(t.shape) for t in near]}")
    if remote and any(isinstance(g, torch.Generator) for g in leaves):
        raise RuntimeError(f"{f} on {NAME} got a generator of the CPU")
    device = kwargs.get("device")
    leaves_device = name in COPIES and remote and (_is_near(args[0]) or (device is not None and not _is_ours(device)))
    by_mask = name in INDEXED and any(isinstance(t, Tensor) and t.dtype == torch.bool for t in _leaves(args[1]))
    for usage in _running:
        if name not in VIEWS:
            usage.kernels[name] += 1
        if name in SYNCS or leaves_device or by_mask:
            usage.syncs[name] += 1
    inner_args, inner = _mapped(_unwrap, args), _mapped(_unwrap, kwargs)
    if _is_ours(device):
        inner["device"] = torch.device("cpu")
    out = f(*inner_args, **inner)
    written = _written(f, args, kwargs)
    if written is not None:
        return written
    lands = remote if device is None else _is_ours(device)
    return _mapped(_wrap, out) if lands else out


def _leaves(tree: Any) -> list[Any]:
    """What is in tuples, lists and dictionaries, which is all that operations take; torch's own is much slower."""
    if isinstance(tree, (tuple, list)):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [leaf for part in tree.values() for leaf in _leaves(part)] if isinstance(tree, dict) else [tree]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tuples, lists and dictionaries with every leaf changed."""
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(change, part) for part in tree])
    return {k: _mapped(change, part) for k, part in tree.items()} if isinstance(tree, dict) else change(tree)


def _unwrap(t: Any) -> Any:
    return t.near if isinstance(t, Remote) else t


def _is_near(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, Remote)


@functools.cache
def _writes(f: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that the operation writes and returns, in the order of what it returns."""
    returned = [r.alias_info.before_set for r in f._schema.returns if r.alias_info and r.alias_info.is_write]
    by_set = {
        frozenset(a.alias_info.before_set): (k, a.name)
        for k, a in enumerate(f._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    }
    return [by_set[frozenset(names)] for names in returned]


def _written(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments that the operation writes and returns, as they were given."""
    values = [kwargs.get(name, args[k] if k < len(args) else None) for k, name in _writes(f)]
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _wrap(t: Any) -> Any:
    if not isinstance(t, Tensor) or isinstance(t, Remote):
        return t
    t = t.resolve_conj().resolve_neg()
    if not torch.is_inference_mode_enabled():
        return Remote(t)
    with torch.inference_mode(False):  # where torch could not make a view of an ordinary tensor
        return Remote(t)


def _factory(f: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch calls for an operation on the device that has no tensor of it among its arguments."""
    return _run(f, args, kwargs)


def _set_up() -> torch.library.Library:
    registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Backend(), hook=_Hook())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_factory, "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast changes no operation of torch
    return library


_library = _set_up()
_is_intercepted = tracing._is_intercepted
tracing._is_intercepted = lambda t: not isinstance(t, Remote) and _is_intercepted(t)  # these do hold numbers


@contextmanager
def visible() -> Iterator[None]:
    """Let torch find the device: `--device auto` then chooses it."""
    _visible[0] = True
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # module.double() would keep the old numbers
    try:
        with _FromData():
            yield
    finally:
        _visible[0] = False
        torch.__future__.set_overwrite_module_params_on_conversion(before)


class _FromData(TorchFunctionMode):
    """Makes tensors from numbers on the CPU and moves them, since torch gives a Python backend no say there."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if f is torch.Tensor.new_tensor and isinstance(args[0], Remote):
            kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            f, args = torch.tensor, args[1:]
        if f in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            device, grad = kwargs.pop("device"), kwargs.pop("requires_grad", False)
            return f(*args, **kwargs).to(device).requires_grad_(grad)
        return f(*args, **kwargs)


@contextmanager
def counted() -> Iterator[Usage]:
    """Count what the device does inside the context."""
    _running.append(usage := Usage(Counter(), Counter()))
    try:
        yield usage
    finally:
        _running.remove(usage)
