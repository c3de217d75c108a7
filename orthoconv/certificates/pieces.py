"""Values that come from separate pieces of one value: side by side, they move no further than the worst of them."""

__all__ = ["pieces_of"]

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

_TUPLES = {torch.chunk, "chunk", torch.split, "split", torch.unbind, "unbind", torch.tensor_split, "tensor_split"}
_MOST = 8  # parents that are tried


def pieces_of(
    nodes: Sequence[fx.Node], known: Collection[fx.Node], env: Mapping[fx.Node, Any]
) -> tuple[fx.Node, list[set[fx.Node]]] | None:
    """Find a value of which each node depends by pieces of its own, which share no entry.

    Arguments:
        nodes: Values that are put side by side.
        known: Nodes that depend on the input of the graph.
        env: Values of the nodes for one input.

    Returns:
        The value, and for each node its pieces; or None.
    """
    for parent in _parents(nodes[0], known)[:_MOST]:
        pieces = [_roots(node, parent, known) for node in nodes]
        if None in pieces:
            continue
        entries = [set[int]().union(*(_entries(p, parent, env[parent]) for p in roots or ())) for roots in pieces]
        if sum(map(len, entries)) == len(set().union(*entries)):
            return parent, [roots for roots in pieces if roots is not None]
    return None


def _parent(node: fx.Node) -> fx.Node | None:
    """The tensor that a node takes a piece of, or None."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    source: Any = node.args[0]
    parent: fx.Node = source.args[0] if source.op != "call_module" and source.target in _TUPLES else source
    return parent


def _parents(node: fx.Node, known: Collection[fx.Node]) -> list[fx.Node]:
    """Values that the node, or something that it comes from, is a piece of; the nearest first."""
    found, seen, queue = dict[fx.Node, None](), {node}, [node]
    while queue:
        here = queue.pop(0)
        parent = _parent(here)
        if parent is not None and parent in known:
            found[parent] = None
        new = [a for a in here.all_input_nodes if a in known and a not in seen]
        seen.update(new)
        queue += new
    return list(found)


def _roots(node: fx.Node, parent: fx.Node, known: Collection[fx.Node]) -> set[fx.Node] | None:
    """Pieces of the parent that a node depends on; None if it depends on anything else of the input."""
    roots, seen, queue = set[fx.Node](), {node}, [node]
    while queue:
        here = queue.pop()
        if _parent(here) is parent:
            roots.add(here)
            continue
        inputs = [a for a in here.all_input_nodes if a in known]
        if here is parent or not inputs:
            return None
        queue += [a for a in inputs if a not in seen]
        seen.update(inputs)
    return roots


def _entries(piece: fx.Node, parent: fx.Node, value: Tensor) -> set[int]:
    """Numbers of the parent's entries that a piece has."""
    numbers: Any = torch.arange(value.numel()).view(value.shape)
    source: Any = piece.args[0]
    steps = [piece] if source is parent else [source, piece]
    for step in steps:
        if any(isinstance(a, fx.Node) for a in step.all_input_nodes[1:]):
            return set(range(value.numel()))  # which no other piece may then have
        target, (_, *rest) = step.target, step.args
        numbers = (
            getattr(numbers, target)(*rest, **step.kwargs)
            if isinstance(target, str)
            else target(numbers, *rest, **step.kwargs)
        )
    return set(numbers.flatten().tolist())
