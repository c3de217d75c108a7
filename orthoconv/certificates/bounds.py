"""Upper bounds of a model, layer by layer: its Lipschitz constant, and what rounding can do to its outputs."""

__all__ = ["Walk", "growth", "lipschitz_bound", "rounding_bound"]

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

import orthoconv.certificates.resampling
import orthoconv.certificates.sequences  # noqa: F401
from orthoconv.certificates.algebra import UNIT, Growth, identity, leaf
from orthoconv.certificates.batches import require_apart, require_input_kept
from orthoconv.certificates.graphs import follow
from orthoconv.certificates.own_forward import graph_of, is_own, require_same
from orthoconv.certificates.rules import Rule, rule_of
from orthoconv.certificates.trust import require_no_global_hooks
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.devices import in_reach_of_double
from orthoconv.linalg import frobenius_norm
from orthoconv.modules import zeros_for
from orthoconv.nn.layer import Child, Combination
from orthoconv.nn.reparametrized import frozen


def lipschitz_bound(model: nn.Module, input_shape: Sequence[int]) -> float:
    """Upper bound of the Lipschitz constant of `model`, in the l2 norm, for inputs of that shape.

    It is made of the norms of the layers as they are. A convolution counts with the largest singular value of its
    operator in the precision of its parameters, found in float64 and rounded up; so "1" may become 1.0000003. The bound
    holds for exact arithmetic with these operators; `certify` adds what rounding does to a forward pass.

    A module with a `forward` of its own is followed through it, if nothing in it depends on values of tensors by `if`.
    Wrappers such as DataParallel, AveragedModel and torch.compile are looked through.

    Arguments:
        model: Made of layers of this library, and of modules that have a rule; see `register_rule`.
        input_shape: Shape of one input, without the batch.

    >>> from orthoconv.nn import CayleyConv2d, Scale
    >>> round(lipschitz_bound(nn.Sequential(CayleyConv2d(3, 8, 3), nn.ReLU(), Scale(0.5)), (3, 8, 8)), 4)
    0.5
    """
    bound = growth(model, input_shape).lipschitz
    model = unwrapped(model)
    with torch.no_grad(), frozen(model):
        model(zeros_for(model, input_shape))  # a shape that the model does not take is an error of the model
    return bound


def rounding_bound(
    model: nn.Module, input_shape: Sequence[int], norm: float, dtype: torch.dtype = torch.float32
) -> float:
    """Bound of the l2 error that rounding makes in the outputs, for inputs of at most that norm.

    It holds for sums in any order, and for what `export` makes of the model, too; so it is far more than what is seen.
    `certify` measures a much smaller one.

    Arguments:
        model: As for `lipschitz_bound`, in eval mode.
        input_shape: Shape of one input, without the batch.
        norm: Largest norm of an input.
        dtype: Precision that the model computes in: torch.float32, or torch.float64 for `in_double`.

    >>> rounding_bound(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8), norm=8.0) < 1e-3
    True
    """
    if not (math.isfinite(norm) and norm >= 0):
        raise ValueError(f"norm must be at least 0 and finite, got {norm!r}")
    return growth(model, input_shape, dtype).error(norm)


def growth(model: nn.Module, input_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Growth:
    """Walk through the model once; return its Lipschitz bound, and how its rounding errors grow.

    Arguments:
        model: As for `lipschitz_bound`.
        input_shape: Shape of one input, without the batch.
        dtype: Precision that the model computes in.

    >>> from orthoconv.nn import Scale
    >>> growth(nn.Sequential(Scale(2.0), Scale(3.0)), (4,)).lipschitz
    6.0
    """
    return Walk(dtype).growth(model, input_shape)


class Walk:
    """A walk through a model and its parts: what it has found out about a layer, it does not compute again.

    The parameters must stay as they are until it ends.

    Arguments:
        dtype: Precision that the model computes in.

    >>> walk, layer = Walk(), nn.Linear(4, 4)
    >>> walk.growth(nn.Sequential(nn.Flatten(), layer), (1, 2, 2)).lipschitz == walk.growth(layer, (4,)).lipschitz
    True
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if dtype not in UNIT:
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
        self._unit = UNIT[dtype]
        self._figures: dict[tuple[nn.Module, torch.Size, bool], _Figures] = {}

    def growth(self, model: nn.Module, input_shape: Sequence[int]) -> Growth:
        """Return the Lipschitz bound of a model, or of a part of it, and how its rounding errors grow."""
        require_no_global_hooks()
        inner = in_reach_of_double(unwrapped(model))
        with torch.inference_mode(False), torch.no_grad(), frozen(inner):
            return self._grow(inner, zeros_for(inner, input_shape), type(model).__name__)

    def _grow(self, module: nn.Module, x: Tensor, path: str) -> Growth:
        def child(name: str, inner: nn.Module, y: Tensor) -> Growth:
            return self._grow(inner, y, f"{path}.{name}")

        def part(name: str, inner: nn.Module, y: Tensor) -> Growth:
            grown = child(name, inner, y)
            require_input_kept(inner, y, f"{path}.{name}")
            return grown

        module = unwrapped(module)
        if is_own(module):
            return _own(module, x, path, part)
        rule = rule_of(module, path)
        if isinstance(module, nn.Sequential):
            return _sequential(module, x, child, self._unit)
        if isinstance(module, Combination):
            grown = module.growth(x, child if module.copies_input else part)
            module(x.clone())  # its parts must fit together
            return _finite(grown, f"{path} ({type(module).__name__})")
        if isinstance(module, fx.GraphModule):
            return follow(module, x, part)
        what = f"{path} ({type(module).__name__})"
        return _finite(self._leaf(module, rule, x, path), what)

    def _leaf(self, module: nn.Module, rule: Rule, x: Tensor, path: str) -> Growth:
        """Growth of a module without parts; its value depends on what comes before it, its figures do not."""
        key = (module, x.shape[1:], module.training)
        if key not in self._figures:  # first: a rule may refuse a module that a forward pass in training changes
            self._figures[key] = _figures(module, rule, x.shape[1:])
        lipschitz, units, constants = self._figures[key]
        y = require_apart(module, x, path)
        offset = frobenius_norm(y)
        if units is None:
            return replace(leaf(self._unit, lipschitz, 0.0, offset), unknown=f"{type(module).__name__}, at {path}")
        return leaf(self._unit, lipschitz, units, offset, constants, x.numel() * y.numel())


class _Figures(NamedTuple):
    """What the rule of a module says of it, for inputs of one shape."""

    lipschitz: float
    units: float | None
    constants: float | None


def _figures(module: nn.Module, rule: Rule, shape: Sequence[int]) -> _Figures:
    lipschitz = rule.lipschitz(module, shape)
    if rule.rounding is None:
        return _Figures(lipschitz, None, None)
    constants = None if rule.constants is None else rule.constants(module, shape)
    return _Figures(lipschitz, rule.rounding(module, shape), constants)


def _own(module: nn.Module, x: Tensor, path: str, child: Child[Growth]) -> Growth:
    """Growth of a module with a forward of its own, by its graph."""
    graph = graph_of(module, x, path)
    grown = _finite(follow(graph, x, child), f"{path} ({type(module).__name__})")
    require_same(module, graph, x, path)
    return grown


def _finite(grown: Growth, what: str) -> Growth:
    """Return `grown`, or raise an error if a weight has spoiled it."""
    for name, value in (("Lipschitz bound", grown.lipschitz), ("value at zero", grown.offset)):
        if not math.isfinite(value):
            raise ValueError(f"the {name} of {what} is {value}; is its weight finite?")
    return grown


def _sequential(module: nn.Sequential, x: Tensor, child: Child[Growth], unit: float) -> Growth:
    grown = identity(unit)
    for name, layer in module._modules.items():  # named_children would leave out a layer that stands in two places
        assert layer is not None
        grown = grown * child(name, layer, x)
        x = layer(x)
    return grown
