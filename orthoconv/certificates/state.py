"""What a model consists of, before and after a forward pass: its attributes, and the entries of its tensors."""

__all__ = ["State"]

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from orthoconv.nn.reparametrized import Reparametrized

_MEMORY = {"_memory", "_frozen"}  # of a layer of ours; it is compared with the tensors at each call, and never stale
_PLAIN = (int, float, complex, str, bytes)


class State:
    """The attributes of all modules of a model at one moment, with copies of their tensors.

    Lists, dictionaries and other containers of Python are looked into. Other objects count by their identity.

    >>> import torch
    >>> model = nn.BatchNorm1d(2)
    >>> state, y = State(model), model(torch.rand(3, 2))
    >>> state.changed()
    'running_mean'
    >>> state.restore()
    >>> model.running_mean
    tensor([0., 0.])
    """

    def __init__(self, model: nn.Module) -> None:
        self.records = [(path, _Record(_attributes(m)), m) for path, m in model.named_modules()]

    def changed(self) -> str:
        """Return the name of an attribute that is no longer what it was; nothing if all are."""
        for path, record, module in self.records:
            if name := record.difference(_attributes(module)):
                names = [part for part in name.split(".") if part not in ("_parameters", "_buffers", "_modules")]
                return ".".join([path, *names] if path else names)
        return ""

    def restore(self) -> None:
        """Make everything what it was."""
        for _, record, module in self.records:
            kept = {name: value for name, value in vars(module).items() if _is_memory(module, name)}
            now = {**record.restored(), **kept}
            vars(module).clear()
            vars(module).update(now)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not _is_memory(module, name)}


def _is_memory(module: nn.Module, name: str) -> bool:
    return name in _MEMORY and isinstance(module, Reparametrized)


class _Record:
    """A value, and what is inside it: the entries of a tensor, or the items of a container."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.items = {key: _Record(item) for key, item in _items(value)}
        self.entries = value.detach().clone() if _is_tensor(value) else None

    def difference(self, other: Any) -> str:
        """Name of the first item that is another one in `other`, "it" if the value itself is; nothing if all are."""
        if isinstance(self.value, _PLAIN):
            return "" if type(other) is type(self.value) and other == self.value else "it"
        if self.entries is not None:
            return "" if other is self.value and _equal(other, self.entries) else "it"
        items = dict(_items(other))
        if not items and not self.items:
            return "" if other is self.value else "it"
        for key in [*self.items, *items]:
            if key not in items or key not in self.items:
                return str(key)
            if name := self.items[key].difference(items[key]):
                return str(key) if name == "it" else f"{key}.{name}"
        return ""

    def restored(self) -> Any:
        """Return the value as it was."""
        value, items = self.value, {key: record.restored() for key, record in self.items.items()}
        if self.entries is not None and not _equal(value, self.entries):
            value.data = self.entries if value.shape != self.entries.shape else value.data.copy_(self.entries)
        if isinstance(value, dict):
            value.clear()
            value.update(items)
        elif isinstance(value, list | deque | set):
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(items.values())
        return value


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple | set | frozenset | deque) else ()


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), Tensor)  # unlike isinstance, without what stands for a tensor in a trace


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether all entries are equal, those that are not a number too."""
    return x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | ((x != x) & (y != y))).all())
