"""Stand-ins for tensors and numbers while a model is traced: what is done to them is written down."""

__all__ = ["Number", "Value"]

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch.fx.proxy import Proxy, TraceError


class _Unread(Proxy):
    """A stand-in whose value cannot be read: then the graph would hold for that value alone."""

    tracer: Any

    def _read(self, *others: Any, **options: Any) -> Any:
        raise self.tracer.leak("values of tensors cannot be turned into numbers")

    __array_struct__ = __array_interface__ = property(_read)
    __float__ = __int__ = __index__ = __complex__ = __len__ = __array__ = __contains__ = __dlpack__ = _read


class Value(_Unread):
    """A tensor in the making. It claims to be a Tensor, and says its shape."""

    _is_param = False

    def __init__(self, node: fx.Node, tracer: Any, values: tuple[Tensor, ...]) -> None:
        super().__init__(node, tracer)
        self.values, self.spoiled = values, False

    @property
    def __class__(self) -> type:  # for isinstance(x, Tensor); type(x) tells
        return Tensor

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("a traced tensor keeps its class")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer", "values", "spoiled", "__class__"):
            raise TraceError(f"an assignment to the attribute {name!r} of a tensor has no rule")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return self.size()
        if name == "ndim":
            return self.dim()
        if name in ("dtype", "device", "is_cuda"):
            return getattr(self.values[0], name)
        if not hasattr(Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return super().__getattr__(name)

    def dim(self) -> int:
        return self.values[0].ndim

    def size(self, dim: int | None = None) -> Any:
        if dim is not None:
            return self.size()[dim]
        tracer: Any = self.tracer
        return tuple(tracer.side(self, d) for d in range(self.dim()))

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)

    def __hash__(self) -> int:
        return id(self)

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def _refuse(self, *others: Any) -> Any:
        raise TraceError("an operation in place has no rule")

    __ipow__ = __ifloordiv__ = __imod__ = __imatmul__ = __iand__ = __ior__ = __ixor__ = __setitem__ = _refuse


class Number(_Unread):
    """A number that comes from the size of the batch, or from tensors."""

    def __init__(self, node: fx.Node, tracer: Any, values: tuple[Any, ...]) -> None:
        super().__init__(node, tracer)
        self.values = values
