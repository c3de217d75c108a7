"""The graph of a network on its way to another one: what its parts are, and how they are replaced."""

__all__ = ["Network"]

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from orthoconv.certificates.functions import as_module
from orthoconv.certificates.moves import SELECTIONS, SHAPE_ONLY
from orthoconv.certificates.pieces import pieces_of
from orthoconv.certificates.tracer import Traced
from orthoconv.conversion.registry import Joined, Part
from orthoconv.conversion.stacks import unstack

_JOINS = {torch.add, operator.add, "add", torch.sub, operator.sub, "sub", torch.mul, operator.mul, "mul"}
_LAYER = 1000  # operations count as one layer
_SEPARABLE = {torch.cat, torch.concat, torch.max, torch.min, torch.maximum, torch.minimum, "max", "min"}


class Network:
    """A traced network. `part` says what a rule needs to know of a node, and `replace` does what it returns."""

    def __init__(self, traced: Traced, layers: dict[str, Any]) -> None:
        self.graph, self.shapes, self.layers = traced.graph, traced.shapes, layers
        unstack(self.graph.graph, self.shapes)
        self.made: dict[Any, nn.Module] = {}
        self.placed: dict[str, nn.Module] = {}
        self.old = {n: self.graph.get_submodule(str(n.target)) for n in self._nodes("call_module")}
        self.lengths, self.scores = self._lengths(), self._scores()
        joins = [n for n in self.graph.graph.nodes if n.target in _JOINS and len(self.inputs(n)) == 2]
        self.share = 1 / max(2, 2 * len(joins))

    @property
    def matrices(self) -> int:
        """Number of calls of modules that have a matrix or a kernel."""
        return sum(any(p.ndim > 1 for p in module.parameters()) for module in self.old.values())

    def _nodes(self, *ops: str) -> list[fx.Node]:
        return [n for n in self.graph.graph.nodes if n.op in ops]

    def parts(self) -> Iterator[fx.Node]:
        """Nodes that compute something: not those that move entries, or compute sizes."""
        for node in self._nodes("call_module", "call_function", "call_method"):
            computes = node.op == "call_module" or node.target not in SHAPE_ONLY | SELECTIONS
            if computes and not self._is_number(node):
                yield node

    def _is_number(self, node: fx.Node) -> bool:
        """Whether a node is a number that comes from sizes, and so has no shape."""
        if node.name in self.shapes:
            return False
        if node.target in ("size", "dim") or node.target is getattr:
            return True
        return not any(a.name in self.shapes for a in node.all_input_nodes)

    def what(self, node: fx.Node) -> str:
        """What a node is called in errors."""
        if node.op == "call_module":
            return type(self.old[node]).__name__
        return str(getattr(node.target, "__name__", node.target))

    def module(self, node: fx.Node) -> nn.Module | None:
        return self.old.get(node)

    def as_module(self, node: fx.Node) -> nn.Module | None:
        """The module that computes what a function does, on tensors without entries."""
        if node.op == "call_module":
            return None
        args: Any = map_arg(node.args, self._value)
        kwargs: Any = map_arg(node.kwargs, self._value)
        return as_module(node.target, args, {k: v for k, v in kwargs.items() if k != "inplace"})

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return getattr(self.graph, str(node.target))
        return torch.empty(self.shapes[node.name], device="meta") if node.name in self.shapes else node

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Tensors that a node takes, in order, and again where it takes one twice; without those of the network."""
        return [a for a in _taken(node) if a.op != "get_attr" and a.name in self.shapes]

    def _lengths(self) -> dict[fx.Node, int]:
        """Length of the shortest way from the input to each node: layers with weights count most, then operations."""
        lengths: dict[fx.Node, int] = {}
        for node in self.graph.graph.nodes:
            ways = [lengths[a] for a in node.all_input_nodes if a.op != "get_attr" and not self._is_number(a)]
            lengths[node] = min(ways, default=0) + (_LAYER if self._has_weights(node) else 1)
        return lengths

    def _has_weights(self, node: fx.Node) -> bool:
        return node.op == "call_module" and any(True for _ in self.old[node].parameters())

    def _scores(self) -> set[fx.Node]:
        """Nodes after the last layer with weights, if the network ends in vectors, which may be scores of classes."""
        nodes = list(self.graph.graph.nodes)
        if not all(len(self.shapes.get(a.name, ())) == 2 for a in nodes[-1].all_input_nodes):
            return set()
        after: set[fx.Node] = set()
        for node in reversed(nodes):
            if all(user in after and not self._has_weights(user) for user in node.users):
                after.add(node)
        return after

    def part(self, node: fx.Node) -> Part:
        """What a rule sees of a node."""
        inputs = self.inputs(node)
        if not inputs:
            raise ValueError("its input is not a tensor that could be followed")
        flat = [a for arg in node.args for a in (arg if isinstance(arg, tuple | list) and _has_nodes(arg) else [arg])]
        constants = tuple(self._value(a) if isinstance(a, fx.Node) else a for a in flat if a not in inputs)
        return Part(
            module=self.old.get(node) or self.as_module(node),
            inputs=tuple(self.shapes[a.name] for a in inputs),
            output=self.shapes.get(node.name, torch.Size()),
            constants=constants,
            options=dict(node.kwargs),
            before=self.old.get(inputs[0]),
            lengths=tuple(self.lengths[a] for a in inputs),
            same=len(inputs) == 2 and inputs[0] is inputs[1],
            separate=node.target in _SEPARABLE and self._are_separate(inputs),
            share=self.share,
            scores=node in self.scores,
            made=self.made,
            **self.layers,
        )

    def _are_separate(self, inputs: list[fx.Node]) -> bool:
        """Whether values come from separate pieces of one; those that are used twice do not."""
        env = {
            n: torch.empty(()).expand(1, *self.shapes[n.name][1:])
            for n in self.graph.graph.nodes
            if n.name in self.shapes
        }
        known = {n for n in self.graph.graph.nodes if n.op != "get_attr" and not self._is_number_node(n)}
        return len(set(inputs)) == len(inputs) and pieces_of(inputs, known, env) is not None

    def _is_number_node(self, node: fx.Node) -> bool:
        return node.name not in self.shapes and node.target not in SELECTIONS

    def replace(self, node: fx.Node, made: Joined) -> None:
        """Let a node call a new module on its tensors, each after what is to be done before."""
        for k, (before, source) in enumerate(zip(made.before, self.inputs(node), strict=False)):
            if before is not None:
                name = f"converted_{node.name}_input{k}"
                self.graph.add_submodule(name, before)
                with self.graph.graph.inserting_before(node):
                    step = self.graph.graph.call_module(name, (source,))
                self._rewire(node, k, step)
        if made.module is None or (made.module is self.old.get(node) and node.op == "call_module"):
            return
        inputs = [a for a in self._arguments(node) if a.op != "get_attr"]
        name = str(node.target) if node.op == "call_module" else f"converted_{node.name}"
        if self.placed.get(name, made.module) is not made.module:
            name = f"converted_{node.name}"
        self.placed[name] = made.module
        self._put(name, made.module)
        node.op, node.target, node.args, node.kwargs = "call_module", name, tuple(inputs), {}

    def _arguments(self, node: fx.Node) -> list[fx.Node]:
        return [a for a in _taken(node) if a.name in self.shapes or a.name.startswith("converted_")]

    def _rewire(self, node: fx.Node, k: int, step: fx.Node) -> None:
        """Let the k-th tensor of a node be another one."""
        seen = iter(range(len(node.args) + 64))
        takes = set(map(id, self.inputs(node)))

        def change(a: fx.Node) -> fx.Node:
            known = id(a) in takes or a.name.startswith("converted_")
            return step if known and next(seen) == k else a

        node.args, node.kwargs = map_arg(node.args, change), map_arg(node.kwargs, change)

    def _put(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        if name.isdecimal() or parent or hasattr(self.graph, name):
            setattr(self.graph.get_submodule(parent), name, module)
        else:
            self.graph.add_submodule(path, module)

    def finish(self) -> fx.GraphModule:
        graph = self.graph
        graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        graph.graph.lint()
        graph.delete_all_unused_submodules()
        for name in [
            k
            for k, v in (*graph.named_parameters(recurse=False), *graph.named_buffers(recurse=False))
            if isinstance(v, Tensor)
        ]:
            if not any(n.op == "get_attr" and n.target == name for n in graph.graph.nodes):
                delattr(graph, name)
        graph.recompile()
        return graph


def _taken(node: fx.Node) -> list[fx.Node]:
    """Nodes whose values a node takes, in order; of `expand_as` the second one is a shape."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found[:1] if node.target == "expand_as" else found


def _has_nodes(arg: Any) -> bool:
    found: list[fx.Node] = []
    map_arg(arg, found.append)
    return bool(found)
