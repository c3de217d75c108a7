"""Random graphs of torch.fx: modules, sums, moved entries, and steps that a bound must refuse."""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from orthoconv.nn import ConvexSum

Part = Callable[[random.Random, tuple[int, ...], int], nn.Module]


@dataclass
class Draft:
    """A graph in the making: its modules, its nodes so far, and the value of each on random inputs."""

    root: nn.Module
    graph: fx.Graph
    values: dict[fx.Node, Tensor]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a function, of a method by its name, or of a module."""
        if isinstance(target, nn.Module):
            name = f"layer{len(self.values)}"
            self.root.add_module(name, target)
            return self.graph.call_module(name, args, kwargs)
        add = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        return add(target, args, kwargs)


Step = Callable[[random.Random, Draft, fx.Node, fx.Node], fx.Node]


def _axes(r: random.Random, x: Tensor) -> tuple[int, int]:
    """Return two axes; now and then one of them is that of the batch."""
    first = 0 if r.random() < 0.15 else 1
    a, b = r.choice(range(first, x.ndim)), r.choice(range(first, x.ndim))
    return a, b


def _view(r: random.Random, d: Draft, a: fx.Node, b: fx.Node) -> fx.Node:
    size: Any = d.call("size", a, 0) if r.random() < 0.7 else len(d.values[a])
    return d.call(r.choice(["view", "reshape"]), a, *r.choice([(size, -1), (-1, size), (size, -1, 1, 1)]))


def _permute(r: random.Random, d: Draft, a: fx.Node, b: fx.Node) -> fx.Node:
    x = d.values[a]
    axes = [0, *r.sample(range(1, x.ndim), x.ndim - 1)]
    return d.call("contiguous", d.call(torch.permute, a, axes)) if r.random() < 0.5 else d.call("permute", a, *axes)


def _halves(r: random.Random, d: Draft, a: fx.Node, b: fx.Node) -> fx.Node:
    """Read the bytes of a value as other numbers, as many as it has."""
    bytes_read = d.call("to", d.call("view", a, torch.float16), a)
    return d.call("nan_to_num", d.call(operator.getitem, bytes_read, (..., slice(0, d.values[a].shape[-1]))), 0, 0, 0)


STEPS: dict[Step, float] = {
    lambda r, d, a, b: d.call(r.choice([torch.add, operator.add]), a, b): 4,
    lambda r, d, a, b: d.call(torch.cat, [a, b], r.choice([1, 1, 1, -1, 0])): 3,
    lambda r, d, a, b: d.call(ConvexSum(), a, b): 2,
    lambda r, d, a, b: d.call(r.choice([F.relu, torch.relu, "relu"]), a): 2,
    lambda r, d, a, b: d.call("transpose", a, *_axes(r, d.values[a])): 2,
    lambda r, d, a, b: d.call(torch.flatten, a, r.choice([1, 1, 1, 2, 0])): 1,
    _view: 2,
    _permute: 2,
    # what has no rule, or works in place
    lambda r, d, a, b: d.call(F.relu, a, inplace=True): 0.3,
    lambda r, d, a, b: d.call(torch.add, a, b, alpha=r.choice([2, -3])): 0.3,
    lambda r, d, a, b: d.call(r.choice([operator.mul, operator.sub, torch.mul, torch.maximum]), a, b): 0.3,
    lambda r, d, a, b: d.call(operator.mul, a, 3.0): 0.3,
    lambda r, d, a, b: d.call(operator.add, a, 1.0): 0.3,
    lambda r, d, a, b: d.call(operator.getitem, a, (slice(None), slice(0, 1))): 0.2,
    lambda r, d, a, b: d.call(r.choice(["add_", "mul_", "relu_"][: 2 + (a is b)]), a, *([] if a is b else [b])): 0.2,
    lambda r, d, a, b: d.call(torch.cat, [a, b], 1, out=b): 0.2,
    _halves: 0.2,
    lambda r, d, a, b: d.call(operator.mul, a, d.call("item", d.call("max", a))): 0.2,
    lambda r, d, a, b: d.call(operator.sub, a, d.call("mean", a, 0, True)): 0.2,
    lambda r, d, a, b: d.call("roll", a, 1, 0): 0.2,
}


def random_graph(r: random.Random, shape: tuple[int, ...], part: Part, batch: int) -> fx.GraphModule:
    """Return a graph of one to five random steps, which runs on batches of one and of `batch`."""
    while True:
        draft = Draft(nn.Module(), fx.Graph(), {})
        draft.values[draft.graph.placeholder("x")] = torch.rand(batch, *shape)
        for _ in range(r.randint(1, 5)):
            _extend(r, draft, part)
        last = next(reversed(draft.values))
        draft.graph.output(last)
        model = fx.GraphModule(draft.root, draft.graph).eval()
        if draft.values[last].dtype == torch.float32 and _runs(model, shape, batch):
            return model


def _extend(r: random.Random, draft: Draft, part: Part) -> None:
    """Add one step that can be computed; steps that cannot are left out again."""
    nodes = list(draft.values)
    a, b = r.choice(nodes[-2:]), r.choice(nodes)
    before = set(draft.graph.nodes)
    try:
        if r.random() < 0.4:
            node = draft.call(part(r, tuple(draft.values[a].shape[1:]), 0), a)
        else:
            (step,) = r.choices(list(STEPS), list(STEPS.values()))
            node = step(r, draft, a, b)
        value = _value(draft, node)
    except (RuntimeError, ValueError, TypeError, IndexError):
        value = None
    if isinstance(value, Tensor) and 1 < value.ndim < 6 and value.shape[0] and value[0].numel() <= 2048:
        draft.values[node] = value
        return
    for new in [n for n in reversed(draft.graph.nodes) if n not in before]:
        draft.graph.erase_node(new)


@torch.no_grad()
def _value(draft: Draft, node: Any) -> Any:
    """Compute a node, and what it takes that has no value yet, such as a size."""
    if not isinstance(node, fx.Node):
        return node
    if node in draft.values:
        return draft.values[node]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _value(draft, n))
    if node.op == "call_module":
        return draft.root.get_submodule(str(node.target))(*args, **kwargs)
    target = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
    return target(*args, **kwargs)


@torch.no_grad()
def _runs(model: fx.GraphModule, shape: tuple[int, ...], batch: int) -> bool:
    """Whether a model takes one input, and a batch of them, to as many outputs of one shape."""
    try:
        one, more = (fx.Interpreter(model).run(torch.rand(b, *shape)) for b in (1, batch))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return len(one) == 1 and len(more) == batch and one.shape[1:] == more.shape[1:]
