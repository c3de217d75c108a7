"""The graph of a module with a `forward` of its own: every operation in order, on values and not in place."""

__all__ = ["Traced", "UntraceableError", "trace"]

import copy
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import GraphAppendingTracer, Proxy, TraceError
from torch.utils._pytree import tree_leaves, tree_map

from orthoconv.certificates.proxies import Number, Value

IsLeaf = Callable[[nn.Module], bool]
_IN_PLACE = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, torch.relu_: torch.relu,
}  # fmt: skip
_CASTS = {"to", "float", "double", "type", "type_as"}
_PATCHING = threading.RLock()  # one trace at a time: it puts a function of its own in the place of nn.Module.__call__
_FAILURES = (TraceError, TypeError, RuntimeError, NameError, NotImplementedError, AttributeError, IndexError, KeyError,
             ValueError, AssertionError)  # fmt: skip

_HINTS = {
    NameError: "; a module that forward itself makes must be made in __init__",
    TypeError: "; a tensor of the network must not be given the size of the batch, as in weight.expand(len(x), -1, -1)",
}


class UntraceableError(TypeError):
    """A module that no graph stands for; the message says why."""


class Traced(NamedTuple):
    """A graph, and the shapes of its values.

    Attributes:
        graph: The graph, whose modules are those of the model, and not copies.
        shapes: Shape of the value of each node, by name, for a batch of 2.
    """

    graph: fx.GraphModule
    shapes: dict[str, torch.Size]


def trace(model: nn.Module, x: Tensor, is_leaf: IsLeaf, visit: Callable[[nn.Module, str], None]) -> Traced:
    """Follow a model through its forward pass, and return the graph of what it computes as it is now.

    The model runs on batches of 2 and of 3 inputs at once. What is the same for both, such as a number of channels, is
    a number in the graph; what differs comes from the size of the batch. Values of tensors are never turned into
    numbers, so that what depends on them by `if` is an error. An operation in place becomes one on values; where
    another name for the old value is used afterwards, that is an error. Gradients are on or off as they were.

    Arguments:
        model: The module.
        x: One input, (1, ...).
        is_leaf: Whether a module becomes one node; other modules are followed into their forward pass.
        visit: Called with each module that is followed into, and its path; it raises an error for a bad one.

    Raises:
        UntraceableError: If the model cannot be followed.
    """
    source = torch.Generator().manual_seed(0)
    xs = tuple(torch.randn(b, *x.shape[1:], generator=source).to(x) for b in (2, 3))
    tracer = _Tracer(model, is_leaf, visit)
    name = type(model).__name__
    try:
        with tracer.calls_of_modules():
            y = model(tracer.placeholder(xs))
        if type(y) is Value:
            return tracer.finish(y)
    except UntraceableError:
        raise
    except _FAILURES as error:
        text = str(error).replace("symbolically traced variables", "values of tensors")
        hint = next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), "")
        where = f"{name} cannot be traced for inputs of {tuple(x.shape[1:])}{tracer.place_of(error)}"
        raise UntraceableError(f"{where}: {text}{hint}") from error
    raise UntraceableError(f"{name} must return one tensor, got {type(y).__name__}")


class _Tracer(GraphAppendingTracer):
    """Makes the graph, and runs each operation on both batches."""

    def __init__(self, model: nn.Module, is_leaf: IsLeaf, visit: Callable[[nn.Module, str], None]) -> None:
        super().__init__(fx.Graph())
        self.is_leaf, self.visit = is_leaf, visit
        self.paths = {m: path for path, m in reversed(list(model.named_modules()))}
        self.root: dict[str, Any] = {}
        self.constants: dict[int, tuple[str, Tensor]] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.sides: dict[tuple[int, ...], Proxy] = {}
        self.alive: weakref.WeakSet[Value] = weakref.WeakSet()
        self.running = False
        self.leaks: list[str] = []
        self.failed: tuple[BaseException, str] | None = None

    def placeholder(self, values: tuple[Tensor, ...]) -> Value:
        proxy = self._proxy(self.graph.placeholder("x"), values)
        assert type(proxy) is Value
        return proxy

    def side(self, x: Value, d: int) -> Any:
        """Length of an axis: a number, or a node where it differs between batches."""
        lengths = tuple(value.shape[d] for value in x.values)
        if lengths[0] == lengths[1]:
            return lengths[0]
        if lengths not in self.sides:
            self.sides[lengths] = self.create_proxy("call_method", "size", (x, d), {})
        return self.sides[lengths]

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        if kind == "call_function" and target is torch._assert:
            return None
        target, kwargs, changed = _on_values(kind, target, args, kwargs)
        node = self.create_node(kind, target, self.create_arg(args), self.create_arg(kwargs))
        values = tuple(self._run(kind, target, args, kwargs, k) for k in (0, 1))
        if target in _CASTS and type(args[0]) is Value and all(map(operator.is_, values, args[0].values)):
            self.graph.erase_node(node)
            return args[0]  # a cast to what it is already
        proxy = self._proxy(node, values)
        if changed:
            self._rename(args[0], proxy)
        return proxy

    def create_arg(self, a: Any) -> Any:
        if type(a) is Value and a.spoiled:
            raise TraceError(f"{a.node.name} is used after an operation in place on a value that shares its memory")
        if isinstance(a, Proxy) and a.tracer is not self:
            raise TraceError("a value of an earlier call is used")
        if isinstance(a, Proxy):
            return a.node if type(a) is not fx.proxy.Attribute else super().create_arg(a)
        if isinstance(a, Tensor):
            return self._constant(a)
        if type(a) is torch.Size:
            return tuple(a)
        return super().create_arg(a)

    def _constant(self, a: Tensor) -> fx.Node:
        """A tensor that does not depend on the input. It stands in the graph, and not in the model."""
        if id(a) not in self.constants:
            self.constants[id(a)] = (f"constant_{len(self.constants)}", a)  # kept, so that its id stays its own
        name, _ = self.constants[id(a)]
        if name not in self.root:
            self.root[name] = a if isinstance(a, nn.Parameter) else a.detach()
        return self.graph.create_node("get_attr", name, (), {})

    def call_module(self, m: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make one node of a leaf, and follow any other module."""
        if self.running or not any(isinstance(a, Proxy) for a in tree_leaves((args, kwargs))):
            return call(m, *args, **kwargs)
        path = self.paths.get(m)
        if path is None:
            raise NameError(f"{type(m).__name__} is not a part of the model")
        if not self.is_leaf(m):
            self.visit(m, path)
            compiled = vars(m).get("_compiled_call_impl") is not None  # by m.compile(); `visit` has looked at it
            follow = nn.Module._call_impl if compiled else call
            return self._follow(m, path, lambda: follow(m, *args, **kwargs))
        in_place = getattr(m, "inplace", False) is True
        path = path or "model"
        if path not in self.root:
            self.root[path] = _out_of_place(m) if in_place else m
        node = self.graph.call_module(path, self.create_arg(args), self.create_arg(kwargs))
        proxy = self._proxy(node, tuple(self._run("call_module", path, args, kwargs, k) for k in (0, 1)))
        if in_place:
            self._rename(args[0], proxy)
        return proxy

    def _follow(self, m: nn.Module, path: str, run: Callable[[], Any]) -> Any:
        """Run the forward pass of a module, and remember the innermost one that an error comes from."""
        try:
            return run()
        except _FAILURES as error:
            if path and (self.failed is None or self.failed[0] is not error):
                self.failed = (error, f", at {path} ({type(m).__name__})")
            raise

    def place_of(self, error: BaseException) -> str:
        """The part of the model that an error comes from, or nothing if it is the model itself."""
        return self.failed[1] if self.failed is not None and self.failed[0] is error else ""

    @contextmanager
    def calls_of_modules(self) -> Iterator[None]:
        """Let calls of modules go through `call_module`, in this thread, and `torch.as_tensor` take traced tensors.

        Functions that take a `Value` for a tensor without asking it, and would crash, are refused.
        """
        with _PATCHING:
            yield from self._patched()

    def _patched(self) -> Iterator[None]:
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (nn.Module, "__call__", lambda call, m, *args, **kwargs: self.call_module(m, call, args, kwargs)),
            (torch, "as_tensor", _as_tensor),
            (torch, "tensor", self._refusing("torch.tensor of a tensor")),
            (torch.autograd.Function, "apply", self._refusing("a torch.autograd.Function")),
            (torch._functorch.utils, "unwrap_dead_wrappers", self._refusing("a torch.autograd.Function")),  # in apply
            (torch._C.ScriptFunction, "__call__", self._refusing("what torch.jit has compiled")),
            (torch._C.ScriptMethod, "__call__", self._refusing("what torch.jit has compiled")),
        ]
        originals = [(place, name, vars(place)[name]) for place, name, _ in places if name in vars(place)]
        try:
            for place, name, instead in places:
                if name in vars(place):
                    setattr(place, name, _in_this_thread(vars(place)[name], instead))
            yield
        finally:
            for place, name, original in originals:
                setattr(place, name, original)

    def _refusing(self, what: str) -> Callable[..., Any]:
        def call(ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, Proxy) for a in tree_leaves((args, kwargs))):
                raise self.leak(f"{what} has no rule")
            return ordinary(*args, **kwargs)

        return call

    def leak(self, text: str) -> TraceError:
        """Return an error, and remember it: a forward pass that goes on after it is no longer followed."""
        self.leaks.append(text)
        return TraceError(text)

    def to_bool(self, obj: Proxy) -> bool:
        raise self.leak("symbolically traced variables cannot be used as inputs to control flow")

    def iter(self, obj: Proxy) -> Iterator[Any]:
        self.leaks.append("an iteration over a tensor")
        return super().iter(obj)

    def finish(self, y: Value) -> Traced:
        if self.leaks:
            raise TraceError(f"{self.leaks[0]}, also where forward goes on after the error")
        self.graph.output(self.create_arg(y))
        module = fx.GraphModule(self.root, self.graph)
        module.training = False  # of the graph alone: its parts are those of the model, and keep their modes
        module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        module.recompile()
        return Traced(module, self.shapes)

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any, k: int) -> Any:
        """Compute an operation on batch k; nothing that it is given may change."""

        def own(a: Any) -> Any:
            return a.values[k] if isinstance(a, Value | Number) else a

        args, kwargs = tree_map(own, args), tree_map(own, kwargs)
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        versions = [0 if a.is_inference() else a._version for a in given]
        self.running = True
        try:
            if kind == "call_module":
                value = self.root[target](*args, **kwargs)
            else:
                value = (
                    target(*args, **kwargs)
                    if kind == "call_function"
                    else getattr(args[0], target)(*args[1:], **kwargs)
                )
        finally:
            self.running = False
        if [0 if a.is_inference() else a._version for a in given] != versions:
            raise TraceError(f"{getattr(target, '__name__', target)} works in place")
        return value

    def _proxy(self, node: fx.Node, values: tuple[Any, ...]) -> Any:
        if isinstance(values[0], Tensor):
            self.shapes[node.name] = values[0].shape
            proxy = Value(node, self, values)
            self.alive.add(proxy)
            return proxy
        if type(values[0]) in (tuple, list):
            items = range(len(values[0]))
            return tuple(
                self.create_proxy("call_function", operator.getitem, (Number(node, self, values), k), {}) for k in items
            )
        return Number(node, self, values)

    def _rename(self, old: Any, new: Any) -> None:
        """Let `old` be the new value, as after an operation in place; what shares its memory may not be used again."""
        if type(old) is not Value or type(new) is not Value or _kind(old) != _kind(new):
            raise TraceError("an operation in place changes a value that is not followed")
        memory, node = old.values[0].untyped_storage().data_ptr(), old.node
        for other in list(self.alive):
            if other is not new and other.node is node:
                other.node, other.values = new.node, new.values
            elif other is not new and other.values[0].untyped_storage().data_ptr() == memory:
                other.spoiled = True


def _in_this_thread(original: Any, instead: Callable[..., Any]) -> Any:
    """Return what calls `instead` with a function and its arguments, and in other threads the function as ever."""
    thread, is_of_class = threading.get_ident(), isinstance(original, classmethod)
    ordinary = original.__func__ if is_of_class else original

    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(ordinary, *args, **kwargs) if threading.get_ident() == thread else ordinary(*args, **kwargs)

    return classmethod(call) if is_of_class else call


def _as_tensor(ordinary: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    return data if type(data) is Value and not args and not kwargs else ordinary(data, *args, **kwargs)


def _on_values(kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """Return the operation that computes the same without working in place, and whether it was in place."""
    if kind == "call_function" and target in _IN_PLACE:
        return _IN_PLACE[target], kwargs, True
    if kwargs.get("inplace") is True:
        return target, {**kwargs, "inplace": False}, True
    name = target if kind == "call_method" else ""
    if name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name[:-1]):
        return name[:-1], kwargs, True
    return target, kwargs, False


def _kind(x: Value) -> tuple[torch.Size, torch.dtype]:
    return x.values[0].shape, x.values[0].dtype


def _out_of_place(m: nn.Module) -> nn.Module:
    twin = copy.copy(m)
    twin.inplace = False  # type: ignore[assignment]
    return twin
