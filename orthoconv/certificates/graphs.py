"""The growth of a graph that torch.fx has traced: each value has one, from those of the values that it comes from."""

__all__ = ["follow"]

import math
import operator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from orthoconv.certificates.algebra import Growth, identity, leaf
from orthoconv.certificates.functions import as_module
from orthoconv.certificates.moves import (
    JOINS,
    REPEATS,
    SELECTIONS,
    BatchSize,
    are_tensors,
    is_move,
    nodes_of,
    require_rows_apart,
)
from orthoconv.certificates.pieces import pieces_of
from orthoconv.certificates.trust import require_as_defined, require_code_of_graph
from orthoconv.linalg import frobenius_norm
from orthoconv.nn.layer import Child
from orthoconv.nn.residual import ConvexSum, UnitCat, convex_weights, unit_weights

_SUMS = {torch.add, operator.add, "add", torch.sub, operator.sub, "sub"}
_PRODUCTS = {torch.mul, operator.mul, "mul"}
_QUOTIENTS = {torch.div, operator.truediv, "div"}
_EXTREMES = {torch.maximum, torch.minimum, torch.max, torch.min, "maximum", "minimum", "max", "min"}
_NEGATIONS = {torch.neg, operator.neg, "neg"}
_MORE = 1 + 2.0**-50  # a factor that is rounded, even if it is 1


def follow(module: fx.GraphModule, x: Tensor, child: Child[Growth]) -> Growth:
    """Run a graph on `x`, and return the growth of its output."""
    require_code_of_graph(module)
    follower = _Follower(module, child)
    follower.run(x)
    require_rows_apart(module, x, follower.env)
    if follower.result is None:
        raise TypeError("a graph is bounded if it returns one tensor")
    return follower.result


class _Follower(fx.Interpreter):
    """Runs a graph, and keeps the growth of each value that is a tensor and depends on the input."""

    def __init__(self, module: fx.GraphModule, child: Child[Growth]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # torch would put its own text behind that of an error
        self.child, self.growths = child, dict[fx.Node, Growth]()
        self.parts = dict[fx.Node, Growth]()  # of modules, from their own inputs
        self.result: Growth | None = None

    def run_node(self, n: fx.Node) -> Any:
        versions = self._versions(n)
        value = super().run_node(n)
        if self._versions(n) != versions:
            raise TypeError(f"a graph is bounded if nothing works in place, got {n.name}")
        if n.op == "output":
            self.result = self.growths.get(n.args[0])  # type: ignore[arg-type]
        elif isinstance(value, Tensor) or are_tensors(value):
            if n.op != "get_attr":
                self.growths[n] = self._grow(n, value)
        elif not self._is_free_of_data(n):
            raise TypeError(f"a graph cannot be bounded where numbers are taken out of a tensor, at {n.name}")
        else:
            return self._marked(n, value)
        return value

    def _marked(self, n: fx.Node, value: Any) -> Any:
        """Return sizes that a node says; that of the batch is a `BatchSize`."""
        if not any(a in self.growths for a in n.all_input_nodes):
            return value
        if isinstance(value, torch.Size):
            return (BatchSize(value[0]), *value[1:]) if value else value
        dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
        whole: Tensor = self.env[n.all_input_nodes[0]]
        return BatchSize(value) if n.target == "size" and dim in (0, -whole.ndim) else value

    def _versions(self, n: fx.Node) -> list[int]:
        """How often each input of a node has been written to; its views count with it."""
        return [self.env[a]._version for a in n.all_input_nodes if isinstance(self.env[a], Tensor)]

    def _is_free_of_data(self, n: fx.Node) -> bool:
        """Whether a value that is no tensor depends on shapes alone."""
        if (n.op, n.target) in (("call_method", "size"), ("call_method", "dim")):
            return True
        if n.target is getattr:
            return n.args[1] in ("shape", "ndim", "dtype", "device")
        if any(type(self.env[a]) is BatchSize for a in n.all_input_nodes):
            raise TypeError(
                f"a graph is bounded if it does the same for batches of any size, but {n.name} computes with their size"
            )
        arithmetic = (operator.getitem, operator.floordiv, operator.mul, operator.add, operator.sub)
        return n.target in arithmetic and not any(a in self.growths for a in n.all_input_nodes)

    def _grow(self, n: fx.Node, value: Any) -> Growth:
        if n.op == "placeholder":
            if self.growths:
                raise TypeError("a graph is bounded if it has one input")
            return self.child(n.name, nn.Identity(), value)
        grown = self._combine(n, value)
        if grown is None:
            target: Any = n.target
            what = type(self.fetch_attr(target)).__name__ if n.op == "call_module" else ""
            name = what or getattr(target, "__name__", target)
            raise TypeError(f"there is no rule for {n.op} {name}, at {n.name} of a graph")
        return grown

    def _combine(self, n: fx.Node, value: Any) -> Growth | None:
        """Growth of a value, from those of the values that it comes from; None without a rule."""
        inputs = [a for a in n.all_input_nodes if a in self.growths]
        if not inputs:
            return None
        if n.op == "call_module":
            return self._module(n, inputs)
        if n.target in JOINS and self._moves_entries(n):
            return None if _may_overlap(n.args[0]) else self._join(nodes_of(n.args[0]))
        if self._moves_entries(n) or self._selects_entries(n):
            return self.growths[inputs[0]]
        for targets, rule in _RULES.items():
            if n.target in targets:
                grown: Growth | None = rule(self, n, value)
                if grown is not None:
                    return grown
        return self._function(n, inputs)

    def _module(self, n: fx.Node, inputs: list[fx.Node]) -> Growth | None:
        """Growth of the value of a module, on one input, or of a ConvexSum or UnitCat on some."""
        layer = self.fetch_attr(str(n.target))
        if type(layer) in (ConvexSum, UnitCat):
            require_as_defined(layer, str(n.target))
            if n.kwargs or any(a not in self.growths for a in n.args):
                return None
            growths = [self.growths[a] for a in n.args]  # type: ignore[index]
            if type(layer) is UnitCat:
                return reduce(Growth.beside, (w * g for w, g in zip(unit_weights(layer.alpha), growths, strict=True)))
            s, rest = convex_weights(layer.alpha)
            return s * growths[0] + rest * growths[-1]
        if len(inputs) == 1 and n.args == (inputs[0],) and not n.kwargs:
            return self._after(n, inputs[0], layer, str(n.target))
        return None

    def _function(self, n: fx.Node, inputs: list[fx.Node]) -> Growth | None:
        """Growth of a function of torch that a module computes, too."""
        given = [a for a in tree_leaves((n.args, n.kwargs)) if a in inputs]
        if len(given) != 1 or not n.args or n.args[0] is not inputs[0]:  # such as F.linear(x, x)
            return None
        if any(type(a) is BatchSize for a in tree_leaves(self.fetch_args_kwargs_from_env(n))):
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        module = as_module(n.target, args, kwargs)
        return None if module is None else self._after(n, inputs[0], module, n.name)

    def _after(self, n: fx.Node, x: fx.Node, module: nn.Module, name: str) -> Growth:
        if n not in self.parts:
            self.parts[n] = self.child(name, module, self.env[x])
        return self.growths[x] * self.parts[n]

    def _join(self, nodes: list[fx.Node]) -> Growth:
        """Growth of values side by side; of separate pieces of one value it is that of the worst."""
        grown = reduce(Growth.beside, (self.growths[a] for a in nodes))
        found = pieces_of(nodes, self.growths, self.env)
        if found is None:
            return grown
        parent, pieces = found
        alone = [self._relative(node, roots) for node, roots in zip(nodes, pieces, strict=True)]
        apart = self.growths[parent] * reduce(Growth.parallel, [a for a in alone if a is not None])
        return apart if None not in alone and apart.lipschitz < grown.lipschitz else grown

    def _relative(self, node: fx.Node, roots: set[fx.Node]) -> Growth | None:
        """Growth of a value as a function of the pieces that it comes from."""
        whole, start = self.growths, identity(self.growths[node].unit)
        self.growths = dict.fromkeys(roots, start)
        try:
            for other in node.graph.nodes:
                inputs = [a for a in other.all_input_nodes if a in self.growths]
                if other in whole and other not in roots and inputs and other in _before(node):
                    grown = self._combine(other, self.env[other])
                    if grown is None:
                        return None
                    self.growths[other] = grown
            return self.growths.get(node)
        finally:
            self.growths = whole

    def _moves_entries(self, n: fx.Node) -> bool:
        """Whether a node moves entries of tensors, and no more: its other arguments are integers, such as shapes."""
        if not is_move(n) or n.target in SELECTIONS or not n.args or set(nodes_of(n.args[0])) - self.growths.keys():
            return False
        if n.target in REPEATS:
            return False
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return all(isinstance(a, int | torch.memory_format) for a in tree_leaves((args[1:], kwargs)))

    def _selects_entries(self, n: fx.Node) -> bool:
        """Whether a node takes entries out of a tensor, each at most once."""
        if n.target not in SELECTIONS or not n.args or n.args[0] not in self.growths:
            return False
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is not operator.getitem:
            return all(isinstance(p, int) for p in tree_leaves((args[1:], kwargs)))
        places = args[1] if isinstance(args[1], tuple) else (args[1],)  # a list would be one of entries
        parts = [q for p in places for q in ((p.start, p.stop, p.step) if isinstance(p, slice) else (p,))]
        return all(p is None or p is ... or type(p) is int for p in parts)

    def _constant(self, a: Any, value: Tensor) -> Tensor | None:
        """A number, or a tensor of the graph, that is repeated to the shape of `value`."""
        if isinstance(a, int | float) and not isinstance(a, bool):
            return torch.full_like(value, a, dtype=torch.float64)
        if isinstance(a, fx.Node) and a.op == "get_attr" and isinstance(self.env[a], Tensor):
            constant: Tensor = self.env[a]
            return None if constant.is_complex() else constant.detach().double().expand_as(value)
        return None

    def _term(self, a: Any, value: Tensor, unit: float) -> Growth | None:
        """Growth of what is added to make `value`: something of its shape, or a constant."""
        if isinstance(a, fx.Node) and a in self.growths:
            return self.growths[a] if self.env[a].shape == value.shape else None  # else something is repeated
        constant = self._constant(a, value)
        return None if constant is None else leaf(unit, 0.0, 0.0, frobenius_norm(constant))

    def _sum(self, n: fx.Node, value: Tensor) -> Growth | None:
        if len(n.args) != 2 or n.kwargs:  # such as alpha
            return None
        unit = next(iter(self.growths.values())).unit
        first, second = (self._term(a, value, unit) for a in n.args)
        return None if first is None or second is None else first + second

    def _product(self, n: fx.Node, value: Tensor) -> Growth | None:
        """Growth of a multiple by constants, or of the quotient."""
        if len(n.args) != 2 or n.kwargs or len([a for a in n.args if a in self.growths]) != 1:
            return None
        x: Any = n.args[0] if n.args[0] in self.growths else n.args[1]
        factor = n.args[1] if x is n.args[0] else n.args[0]
        constant = self._constant(factor, value)
        if constant is None or self.env[x].shape != value.shape or (n.target in _QUOTIENTS and x is not n.args[0]):
            return None
        constant = 1 / constant if n.target in _QUOTIENTS else constant
        return float(constant.abs().max()) * _MORE * self.growths[x]

    def _extreme(self, n: fx.Node, value: Any) -> Growth | None:
        """The larger or smaller of two values moves by no more than both, entry by entry."""
        if len(n.args) != 2 or n.kwargs or any(self._shape(a) != value.shape for a in n.args):
            return None
        return self._join(nodes_of(n.args))

    def _shape(self, a: Any) -> torch.Size | None:
        return self.env[a].shape if isinstance(a, fx.Node) and a in self.growths else None

    def _repeat(self, n: fx.Node, value: Tensor) -> Growth | None:
        x: Any = n.args[0]
        if x not in self.growths or not is_move(n):
            return None
        return math.sqrt(value.numel() / max(1, self.env[x].numel())) * _MORE * self.growths[x]

    def _negative(self, n: fx.Node, value: Tensor) -> Growth | None:
        return self.growths[n.args[0]] if len(n.args) == 1 and not n.kwargs else None  # type: ignore[index]


_RULES: dict[frozenset[Any], Any] = {
    frozenset(_SUMS): _Follower._sum,
    frozenset(_PRODUCTS | _QUOTIENTS): _Follower._product,
    frozenset(_EXTREMES): _Follower._extreme,
    frozenset(REPEATS): _Follower._repeat,
    frozenset(_NEGATIONS): _Follower._negative,
}


def _may_overlap(pieces: Any) -> bool:
    """Whether the pieces of a value, joined as one tuple, may share entries: those of other splits never do."""
    return isinstance(pieces, fx.Node) and pieces.target in (torch.tensor_split, "tensor_split")


def _before(node: fx.Node) -> set[fx.Node]:
    """A value, and all that it comes from."""
    seen, queue = {node}, [node]
    while queue:
        new = [a for a in queue.pop().all_input_nodes if a not in seen]
        seen.update(new)
        queue += new
    return seen
