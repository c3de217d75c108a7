"""Nodes of a graph that only move entries of tensors, and whether a graph keeps the examples of a batch apart."""

__all__ = ["JOINS", "REPEATS", "SELECTIONS", "SHAPE_ONLY", "BatchSize", "are_tensors", "is_move", "nodes_of",
           "require_rows_apart"]  # fmt: skip

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
              torch.moveaxis, "moveaxis", torch.roll, "roll", torch.rot90, "rot90", torch.clone, "clone"}  # fmt: skip
SELECTIONS = {operator.getitem, torch.chunk, "chunk", torch.split, "split", torch.unbind, "unbind", torch.narrow,
               "narrow", torch.select, "select", torch.tensor_split, "tensor_split"}  # fmt: skip
JOINS = {torch.cat, torch.concat, torch.stack}
REPEATS = {"expand", "expand_as", "repeat"}


class BatchSize(int):
    """The size of a batch. It may be the length of an axis; nothing may be computed from it.

    >>> torch.zeros(3, 2, 2).view(BatchSize(3), -1).shape
    torch.Size([3, 4])
    """


def require_rows_apart(module: fx.GraphModule, x: Tensor, alone: dict[fx.Node, Any]) -> None:
    """Raise an error if a graph mixes the examples of a batch, or makes other shapes of more of them.

    Arguments:
        module: The graph.
        x: Input (1, ...) of the shape that it takes.
        alone: The value of each node for one input.
    """
    for b in (2, 3):
        _Rows(module, alone).run(rows((b, *x.shape[1:]), x))


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
        if _shapes(value) != _shapes(self.alone[n]):
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


def _shapes(value: Any) -> list[torch.Size]:
    """Shapes of a tensor or of some, without the batch."""
    return [v.shape[1:] for v in tree_leaves(value) if isinstance(v, Tensor)]


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
