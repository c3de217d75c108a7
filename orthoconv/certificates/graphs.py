"""The growth of a graph that torch.fx has traced: each value has one, from those of the values that it comes from."""

__all__ = ["SHAPE_ONLY", "follow"]

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from orthoconv.certificates.algebra import Growth
from orthoconv.certificates.batches import rows
from orthoconv.certificates.trust import require_as_defined
from orthoconv.nn.layer import Child
from orthoconv.nn.residual import ConvexSum, convex_weights

SHAPE_ONLY = {torch.flatten, torch.reshape, torch.permute, torch.transpose, "flatten", "view", "reshape", "permute",
              "transpose", "contiguous"}  # fmt: skip
_RELU = {F.relu, torch.relu, "relu"}


def follow(module: fx.GraphModule, x: Tensor, child: Child[Growth]) -> Growth:
    """Run a graph on `x`, and return the growth of its output."""
    if module.graph.python_code("self").src != module.code:
        raise TypeError("a graph is bounded as it runs; call recompile() after changing it")
    follower = _Follower(module, child)
    follower.run(x)
    for b in (2, 3):
        _Rows(module).run(rows((b, *x.shape[1:]), x))
    if follower.result is None:
        raise TypeError("a graph is bounded if it returns one tensor")
    return follower.result


class _Follower(fx.Interpreter):
    """Runs a graph, and keeps the growth of each value that is a tensor."""

    def __init__(self, module: fx.GraphModule, child: Child[Growth]) -> None:
        super().__init__(module)
        self.child, self.growths = child, dict[fx.Node, Growth]()
        self.result: Growth | None = None

    def run_node(self, n: fx.Node) -> Any:
        versions = self._versions(n)
        value = super().run_node(n)
        if self._versions(n) != versions:
            raise TypeError(f"a graph is bounded if nothing works in place, got {n.name}")
        if n.op != "output" and not isinstance(value, Tensor) and not self._is_free_of_data(n):
            raise TypeError(f"a graph cannot be bounded where numbers are taken out of a tensor, at {n.name}")
        if n.op == "output":
            self.result = self.growths.get(n.args[0])  # type: ignore[arg-type]
        elif isinstance(value, Tensor):
            self.growths[n] = self._grow(n, value)
        return value

    def _versions(self, n: fx.Node) -> list[int]:
        """How often each input of a node has been written to; its views count with it."""
        return [self.env[a]._version for a in n.all_input_nodes if isinstance(self.env[a], Tensor)]

    def _is_free_of_data(self, n: fx.Node) -> bool:
        """Whether a value that is no tensor depends on shapes alone."""
        if (n.op, n.target) in (("call_method", "size"), ("call_method", "dim")):
            return True
        if n.target is getattr:
            return n.args[1] in ("shape", "ndim", "dtype", "device")
        arithmetic = (operator.getitem, operator.floordiv, operator.mul, operator.add, operator.sub)
        return n.target in arithmetic and not any(a in self.growths for a in n.all_input_nodes)

    def _grow(self, n: fx.Node, value: Tensor) -> Growth:
        if n.op == "placeholder":
            if self.growths:
                raise TypeError("a graph is bounded if it has one input")
            return self.child(n.name, nn.Identity(), value)
        inputs = [a for a in n.all_input_nodes if a in self.growths]
        target: Any = n.target
        grown = None
        if n.op == "call_module":
            grown = self._module(n, inputs)
        elif self._is_sum(n) and len({self.env[a].shape for a in inputs}) == 1:  # else something is repeated
            grown = self._sum(n)
        elif self._moves_entries(n) or _is_relu(n):
            grown = reduce(Growth.beside, (self.growths[a] for a in _nodes(n.args[0])))
        if grown is None:
            raise TypeError(f"there is no rule for {n.op} {getattr(target, '__name__', target)}, at {n.name}")
        return grown

    def _moves_entries(self, n: fx.Node) -> bool:
        """Whether a node moves entries of tensors, and no more: its other arguments are integers, such as shapes."""
        if not _is_move(n) or not n.args or set(_nodes(n.args[0])) - self.growths.keys():
            return False
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return all(isinstance(a, int | torch.memory_format) for a in tree_leaves((args[1:], kwargs)))

    def _module(self, n: fx.Node, inputs: list[fx.Node]) -> Growth | None:
        """Growth of the value of a module, on one input, or of a ConvexSum on two."""
        layer, growths = self.fetch_attr(str(n.target)), [self.growths[a] for a in inputs]
        if type(layer) is ConvexSum:
            require_as_defined(layer, str(n.target))
            if len(n.args) == 2 and len(growths) in (1, 2):
                s, rest = convex_weights(layer.alpha)
                return s * growths[0] + rest * growths[-1]
        if len(growths) == 1 and n.args == (inputs[0],) and not n.kwargs:
            return growths[0] * self.child(str(n.target), layer, self.env[inputs[0]])
        return None

    def _is_sum(self, n: fx.Node) -> bool:
        """Whether two values are added, and nothing else is done, such as a multiplication by alpha."""
        return n.target in (torch.add, operator.add, "add") and len(n.args) == 2 and not n.kwargs

    def _sum(self, n: fx.Node) -> Growth:
        added = [self.growths[a] for a in n.args if isinstance(a, fx.Node) and a in self.growths]
        if len(added) == 1:
            return replace(added[0], unknown=added[0].unknown or f"a number that is added, at {n.name} of a graph")
        return added[0] + added[1]


class _Rows(fx.Interpreter):
    """Runs a graph on entries that are the numbers of their examples, and raises an error where examples mix.

    After each node the entries are such numbers again, so that what follows is looked at by itself.
    """

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output" or not isinstance(value, Tensor):
            return value
        inputs = [self.env[a] for a in n.all_input_nodes if isinstance(self.env[a], Tensor)]
        fresh = rows(value.shape, value)
        if any(len(value) != len(y) for y in inputs) or (_is_move(n) and not torch.equal(value, fresh)):
            raise TypeError(f"a graph is bounded if it keeps the examples of a batch apart, which {n.name} mixes")
        return fresh


def _is_move(n: fx.Node) -> bool:
    return n.op in ("call_function", "call_method") and (n.target in SHAPE_ONLY or n.target is torch.cat)


def _is_relu(n: fx.Node) -> bool:
    """Whether a node is relu(x), and not in place."""
    return n.target in _RELU and not any(tree_leaves((n.args[1:], n.kwargs)))


def _nodes(arg: Any) -> list[fx.Node]:
    """Values that an argument is, or is a sequence of."""
    return [a for a in (arg if isinstance(arg, Sequence) else [arg]) if isinstance(a, fx.Node)]
