"""Sums of values that are written as a stack of them and a sum or a mean over its axis."""

__all__ = ["unstack"]

import operator
from typing import Any

import torch
from torch import fx

_REDUCTIONS = {torch.sum, "sum", torch.mean, "mean"}


def unstack(graph: fx.Graph, shapes: dict[str, torch.Size]) -> None:
    """Write ``torch.stack(xs, d).sum(d)`` as x_1 + x_2 + ..., and a mean likewise: a rule makes a mean of a sum anyway.

    Arguments:
        graph: The graph, which is changed.
        shapes: Shape of the value of each node, to which those of the sums are added.
    """
    for node in list(graph.nodes):
        stack = _stack_of(node, shapes)
        if stack is None:
            continue
        total, *others = stack.args[0]
        with graph.inserting_before(node):
            for other in others:
                total = graph.call_function(operator.add, (total, other))
                shapes[total.name] = shapes[other.name]
        node.replace_all_uses_with(total)
        graph.erase_node(node)
        graph.erase_node(stack)


def _stack_of(node: fx.Node, shapes: dict[str, torch.Size]) -> Any:
    """The stack whose axis a node sums over, and which nothing else uses; or None."""
    stack: Any = node.args[0] if node.target in _REDUCTIONS and node.args else None
    if not isinstance(stack, fx.Node) or stack.target is not torch.stack or len(stack.users) != 1:
        return None
    given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    dims: Any = given.get("dim")
    axes = [dims] if isinstance(dims, int) else list(dims or ())
    rank = len(shapes[stack.name])
    axis: Any = stack.kwargs.get("dim", stack.args[1] if len(stack.args) > 1 else 0)
    is_plain = len(stack.args) > 0 and not given.get("keepdim") and given.keys() <= {"dim", "keepdim"}
    return stack if is_plain and [d % rank for d in axes] == [axis % rank] else None
