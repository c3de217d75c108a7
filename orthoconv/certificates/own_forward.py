"""Modules with a `forward` of their own: the graph of what they compute, or an error that says why there is none."""

__all__ = ["bounded_form", "graph_of", "headed_form", "is_own", "require_same"]

import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, fx, nn

from orthoconv.certificates.heads import AFTER_HEAD
from orthoconv.certificates.rules import base_with_rule
from orthoconv.certificates.state import State
from orthoconv.certificates.tracer import UntraceableError, trace
from orthoconv.certificates.trust import GRADIENT_MODES, is_plain, require_as_defined
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.modules import zeros_for
from orthoconv.nn.ensemble import Ensemble
from orthoconv.nn.isometry import IsometryAverage

_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattribute__")
_SAME = 1e-3  # of the largest output: the same operations in the same order differ by rounding at most
_SCALES = ((2, 1.0), (3, 0.1), (1, 30.0))  # of random inputs, and how many


def is_own(module: nn.Module) -> bool:
    """Whether a module is of a class that no rule knows, is not torch's, and has a function `forward`."""
    kind = type(module)
    if base_with_rule(kind) is not None or kind.__module__.split(".")[0] == "torch":
        return False
    return inspect.isfunction(inspect.getattr_static(kind, "forward", None))


def bounded_form(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """Return what certificates speak of: the model without wrappers, and the graph of one with its own forward."""
    model = unwrapped(model)
    if not is_own(model):
        return model
    with torch.no_grad():
        return graph_of(model, zeros_for(model, input_shape), type(model).__name__)


def headed_form(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """Return the model with graphs in place of what it ends in, so that its last linear layer can be seen.

    That is the last layer of an `nn.Sequential`, the model of an `IsometryAverage`, and the members of an `Ensemble`,
    as far as they have a forward of their own. What follows a head stays.
    """
    with torch.no_grad():
        return _form(model, zeros_for(model, input_shape), type(model).__name__)


def _form(module: nn.Module, x: Tensor, path: str) -> nn.Module:
    module = unwrapped(module)
    if is_own(module):
        return graph_of(module, x, path)
    if not any(is_own(unwrapped(m)) for m in module.modules()):
        return module
    if isinstance(module, IsometryAverage) and is_plain(module, IsometryAverage):
        return module.of(_form(module.f, x, f"{path}.f")).train(module.training)
    if isinstance(module, Ensemble) and is_plain(module, Ensemble):
        members = [_form(member, x, f"{path}.members.{k}") for k, member in enumerate(module.members)]
        return Ensemble(members).train(module.training)
    if isinstance(module, nn.Sequential) and is_plain(module, nn.Sequential):
        layers = dict(module._modules)  # children() would leave out a layer that stands in two places
        ends = [name for name, layer in layers.items() if not _follows(layer)]
        if ends:
            *before, last = list(layers)[: list(layers).index(ends[-1]) + 1]
            layers[last] = _form(layers[last], nn.Sequential(*(layers[k] for k in before))(x.clone()), f"{path}.{last}")
            return nn.Sequential(OrderedDict(layers)).train(module.training)
    return module


def _follows(layer: nn.Module | None) -> bool:
    """Whether a layer, or all those of an `nn.Sequential`, may follow a head."""
    return isinstance(layer, AFTER_HEAD) or (isinstance(layer, nn.Sequential) and all(map(_follows, layer)))


def graph_of(module: nn.Module, x: Tensor, path: str) -> fx.GraphModule:
    """Return the graph of a module with a forward of its own, in the mode it is in; what it does must be all there.

    In eval mode it is traced without gradients, with them, and in inference mode; in training mode once more. All these
    graphs must be the same, and a forward pass in eval mode must leave everything in the module as it is.
    """
    training = any(m.training for m in module.modules())
    steady = copy.deepcopy(module).eval() if training else module
    with suppress(Exception), torch.no_grad():  # the trace will say what is wrong
        steady(x.clone())  # what a module makes at its first call is there from now on
    graph, *others = _steady_graphs(steady, x, path)
    for other in others:
        _require_equal(graph, other, f"{path} changes from call to call, or with gradients or in inference mode")
    if not training:
        return graph
    before = State(module)
    try:
        own = _trace(module, x, path)
    finally:
        before.restore()
    _require_equal(own, graph, f"{path} computes something else in training; call model.eval()")
    return own


def _steady_graphs(module: nn.Module, x: Tensor, path: str) -> list[fx.GraphModule]:
    """Trace a module in each of `GRADIENT_MODES`; raise an error if that changes it."""
    state, graphs = State(module), list[fx.GraphModule]()
    try:
        for grad, inference in GRADIENT_MODES:
            graphs.append(_trace(module, x, path, grad, inference))
            if changed := state.changed():
                raise TypeError(
                    f"a module is bounded if it always computes the same, but {path} ({type(module).__name__}) changes "
                    f"from call to call: its forward writes to {changed}"
                )
    finally:
        state.restore()
    return graphs


def _trace(module: nn.Module, x: Tensor, path: str, grad: bool = False, inference: bool = False) -> fx.GraphModule:
    def visit(m: nn.Module, name: str) -> None:
        where = f"{path}.{name}" if name else path
        require_as_defined(m, where)
        if changed := [c for c in _CALLS if getattr(type(m), c, None) is not getattr(nn.Module, c, None)]:
            raise UntraceableError(f"there is no rule for {changed[0]} of {type(m).__name__}, at {where}")

    kind = type(module)
    try:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return trace(module, x, lambda m: m is not module and not is_own(m), visit).graph
    except UntraceableError as error:
        raise TypeError(
            f"there is no rule for {kind.__module__}.{kind.__name__}, at {path}; give it one with "
            f"orthoconv.register_rule, or a forward pass that can be traced: {error}"
        ) from error


def _require_equal(graph: fx.GraphModule, other: fx.GraphModule, text: str) -> None:
    tensors, others = (dict(_tensors(g)) for g in (graph, other))
    same = tensors.keys() == others.keys() and all(torch.equal(v, others[k]) for k, v in tensors.items())
    if graph.code != other.code or not same:
        raise TypeError(f"a module is bounded if it always computes the same, but {text}")


def _tensors(graph: fx.GraphModule) -> list[tuple[str, Tensor]]:
    """Names and values of the tensors that stand in the graph itself."""
    names = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    return [(name, getattr(graph, name)) for name in sorted(names)]


def require_same(module: nn.Module, graph: fx.GraphModule, x: Tensor, path: str) -> None:
    """Raise an error if the module and its graph differ on random inputs: then something was not followed."""
    source = torch.Generator().manual_seed(1)
    for b, scale in _SCALES:
        z = scale * torch.randn(b, *x.shape[1:], generator=source).to(x)
        try:
            y, other = module(z.clone()), graph(z.clone())
        except (RuntimeError, ValueError, IndexError) as error:
            raise TypeError(f"{path} takes one input of shape {tuple(x.shape[1:])}, but not {b}: {error}") from error
        largest = float(y.abs().nan_to_num(0, 0, 0).max()) if y.numel() else 0.0
        if y.shape != other.shape or not torch.allclose(y, other, rtol=0, atol=_SAME * largest, equal_nan=True):
            raise TypeError(f"{path} ({type(module).__name__}) does not compute what its traced graph does")
