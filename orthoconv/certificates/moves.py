"""Nodes of a graph that only move entries of tensors, and whether a graph keeps the examples of a batch apart."""

__all__ = ["JOINS", "REPEATS", "SELECTIONS", "SHAPE_ONLY", "are_tensors", "facts_of", "is_move",
           "nodes_of", "require_rows_apart"]  # fmt: skip

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from orthoconv.certificates.batches import rows

SHAPE_ONLY = {torch.flatten, torch.reshape, torch.permute, torch.transpose, "flatten", "view", "reshape", "permute",
              "transpose", "contiguous", torch.squeeze, "squeeze", torch.unsqueeze, "unsqueeze", torch.unflatten,
              "unflatten", torch.movedim, "movedim", torch.swapaxes, "swapaxes", torch.flip, "flip",
              torch.clone, "clone"}  # fmt: skip
SELECTIONS = {operator.getitem, torch.chunk, "chunk", torch.split, "split", torch.unbind, "unbind", torch.narrow,
               "narrow", torch.select, "select", torch.tensor_split, "tensor_split"}  # fmt: skip
JOINS = {torch.cat, torch.concat, torch.stack}
REPEATS = {"expand", "expand_as", "repeat"}


def require_rows_apart(module: fx.GraphModule, x: Tensor, alone: dict[fx.Node, Any]) -> None:
    """Raise an error if a graph mixes the examples of a batch, or does something else for more of them.

    Arguments:
        module: The graph.
        x: Input (1, ...) of the shape that it takes.
        alone: What `facts_of` says of each node for that input.
    """
    for b in (2, 3):
        _Rows(module, alone).run(rows((b, *x.shape[1:]), x))


def facts_of(interpreter: fx.Interpreter, n: fx.Node, value: Any) -> Any:
    """What must not depend on the size of the batch: the shape of a value without it, and the numbers of a function."""
    shapes = [v.shape[1:] for v in tree_leaves(value) if isinstance(v, Tensor)]
    if is_move(n):  # such as view(len(x), -1)
        return shapes
    given = tree_leaves(interpreter.fetch_args_kwargs_from_env(n))
    return shapes, [a for a in given if not isinstance(a, Tensor)]


class _Rows(fx.Interpreter):
    """Runs a graph on entries that are the numbers of their examples, and raises an error where examples mix.

    After each node the entries are such numbers again, so that what follows is looked at by itself.
    """

    def __init__(self, module: fx.GraphModule, alone: dict[fx.Node, Any]) -> None:
        super().__init__(module)
        self.alone = alone

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op in ("output", "get_attr") or not (isinstance(value, Tensor) or are_tensors(value)):
            return value
        nodes = [a for a in n.all_input_nodes if a.op != "get_attr"]
        lengths = {len(y) for a in nodes for y in tree_leaves(self.env[a]) if isinstance(y, Tensor)}
        single = isinstance(value, Tensor)
        fresh = self._fresh(n, value, lengths) if single else type(value)(self._fresh(n, y, lengths) for y in value)
        if n in self.alone and facts_of(self, n, value) != self.alone[n]:
            raise TypeError(
                f"a graph is bounded if it keeps the examples of a batch apart and does the same for batches of any "
                f"size, unlike {n.name}"
            )
        return fresh

    def _fresh(self, n: fx.Node, value: Tensor, lengths: set[int]) -> Tensor:
        fresh = rows(value.shape, value)
        if lengths - {len(value)} or (is_move(n) and not torch.equal(value, fresh)):
            raise TypeError(f"a graph is bounded if it keeps the examples of a batch apart, which {n.name} mixes")
        return fresh


def are_tensors(value: Any) -> bool:
    """Whether a value is a tuple or list of tensors, such as the pieces of a split."""
    return type(value) in (tuple, list) and bool(value) and all(isinstance(v, Tensor) for v in value)


def is_move(n: fx.Node) -> bool:
    """Whether a node moves, selects, joins or repeats entries."""
    moves = n.target in SHAPE_ONLY or n.target in JOINS or n.target in SELECTIONS or n.target in REPEATS
    return n.op in ("call_function", "call_method") and moves


def nodes_of(arg: Any) -> list[fx.Node]:
    """Values that an argument is, or is a sequence of."""
    return [a for a in (arg if isinstance(arg, Sequence) else [arg]) if isinstance(a, fx.Node)]
