"""Certificates of models that end in a linear layer: each pair of classes has a bound of its own."""

__all__ = ["AFTER_HEAD", "Head", "pairwise_radius", "pairwise_rates", "pairwise_reach", "split_head"]

import copy
import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from orthoconv.certificates.algebra import product
from orthoconv.certificates.downward import rounded_down
from orthoconv.certificates.trust import is_plain
from orthoconv.devices import in_double_near
from orthoconv.margins import check_logits
from orthoconv.modules import compiled_from
from orthoconv.nn.affine import Shift
from orthoconv.nn.ensemble import Ensemble
from orthoconv.nn.isometry import IsometryAverage
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.normalize import Scale

_EPS = torch.finfo(torch.float64).eps
_TINY = 1e-100  # the squares of smaller differences may vanish in float64
_SMALLEST = sys.float_info.min  # a bound below it has lost digits


AFTER_HEAD = (Scale, Shift, nn.Identity, nn.Dropout)  # what may follow the last linear layer


class Head(NamedTuple):
    """A model whose logits are factor (W body(x) + bias).

    Attributes:
        body: The layers before the last linear one.
        matrix: The matrix W of that layer as it runs, (classes, features).
        factor: Product of the `Scale` layers after it.
    """

    body: nn.Sequential
    matrix: Tensor
    factor: float

    def distances(self) -> Tensor:
        """Distances of the rows of factor W to each other, (classes, classes), found in float64 and rounded up."""
        W = self.matrix.detach().double()
        n = W.shape[1]
        largest, norm = (torch.cdist(W, W, p, "donot_use_mm_for_euclid_dist") for p in (math.inf, 2.0))
        norm = torch.where(largest < _TINY, math.sqrt(n) * largest, norm)
        scaled = abs(self.factor) * norm * (1 + 10 * (n + 1) * _EPS)
        return torch.where((norm > 0) & (self.factor != 0), scaled.clamp_min(_SMALLEST), scaled)


def split_head(model: nn.Module) -> Head | None:
    """Split a model into its body and its last linear layer; return None if it does not end in one.

    The model is an `nn.Sequential`, nested or not, or a graph of torch.fx, that ends in an `nn.Linear` or a
    `BaseLinear`; only `Scale`, `Shift`, `nn.Identity` and `nn.Dropout` may follow. Or it ends in the `IsometryAverage`
    of such a model. Whether each part does what its class says, `growth` finds out.

    >>> from orthoconv.nn import MaxMin
    >>> head = split_head(nn.Sequential(nn.Linear(8, 4), MaxMin(), nn.Sequential(nn.Linear(4, 3), Scale(-2.0))))
    >>> len(head.body), tuple(head.matrix.shape), head.factor
    (2, (3, 4), -2.0)
    >>> split_head(nn.Sequential(nn.Linear(8, 4), MaxMin()))
    """
    layers, factor = list(_layers(model)), 1.0
    while layers:
        last = layers.pop()
        if isinstance(last, Scale) and is_plain(last, Scale):
            factor = product(factor, last.factor)
        elif isinstance(last, IsometryAverage) and is_plain(last, IsometryAverage):
            inner = split_head(last.f)  # the mean of W f is W times the mean of f
            if inner is None:
                return None
            return Head(nn.Sequential(*layers, last.of(inner.body)), inner.matrix, product(factor, inner.factor))
        elif isinstance(last, nn.Linear) and is_plain(last, nn.Linear):
            return Head(nn.Sequential(*layers), last.weight, factor)
        elif isinstance(last, BaseLinear) and is_plain(last, BaseLinear):
            return Head(nn.Sequential(*layers), last.cached_operator(), factor)
        elif not _may_follow(last):
            return None
    return None


def _may_follow(layer: nn.Module) -> bool:
    return any(isinstance(layer, kind) and is_plain(layer, kind) for kind in AFTER_HEAD)


def pairwise_rates(model: nn.Module, bound: Callable[[nn.Module], float]) -> Tensor | None:
    """Bounds of the Lipschitz constants of the differences of two logits, (classes, classes), in float64.

    For a model that ends in a linear layer, these are the bound of its body times the distances of the rows. For the
    mean of such models, `Ensemble`, they are the mean of theirs: the difference of two logits is the mean of
    the members' differences.

    Arguments:
        model: Model as in `split_head`, or one that ends in an `Ensemble` of such models.
        bound: Function that returns the Lipschitz bound of a part of the model that begins where the model does.

    Returns:
        The bounds, or None if the model ends in neither.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.eye(2))
    >>> pairwise_rates(nn.Sequential(Ensemble([model, nn.Sequential(model, Scale(3.0))])), lambda body: 1.0)
    tensor([[0.0000, 2.8284],
            [2.8284, 0.0000]], dtype=torch.float64)
    """
    members = _members(model)
    if members is None:
        head = split_head(model)
        if head is None:
            return None
        distances = head.distances()
        rate = bound(head.body) * distances * (1 + 2 * _EPS)
        return torch.where(distances > 0, rate.clamp_min(sys.float_info.min), 0)  # a small bound is not none
    known = [rates for member in members if (rates := pairwise_rates(member, bound)) is not None]
    if len(known) < len(members):
        return None
    return torch.stack(known).mean(0) * (1 + (len(known) + 2) * _EPS)


def _members(model: nn.Module) -> list[nn.Module] | None:
    """Models whose mean is `model`, if it ends in an `Ensemble`: each is a member between what comes before and after.

    The mean over the mirror image of an ensemble is the ensemble of the means.
    """
    layers, after = list(_layers(model)), list[nn.Module]()
    while layers:
        last = layers.pop()
        if isinstance(last, Ensemble) and is_plain(last, Ensemble):
            return [nn.Sequential(*layers, member, *after) for member in last.members]
        if isinstance(last, IsometryAverage) and is_plain(last, IsometryAverage):
            inner = _members(last.f)
            return inner and [nn.Sequential(*layers, last.of(member), *after) for member in inner]
        if not _may_follow(last):
            return None
        after.insert(0, last)
    return None


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Layers in the order in which they run: those of nested `nn.Sequential`, and the last ones of a graph."""
    if (original := compiled_from(module)) is not None:
        yield from _layers(original)
        return
    if isinstance(module, fx.GraphModule) and is_plain(module, fx.GraphModule):
        body, last = _without_last(module)
        if last is not None:
            yield from (*_layers(body), *_layers(last))
            return
    if not (isinstance(module, nn.Sequential) and is_plain(module, nn.Sequential)):
        yield module
        return
    for layer in module._modules.values():  # children() would leave out a layer that stands in two places
        assert layer is not None
        yield from _layers(layer)


def _without_last(graph: fx.GraphModule) -> tuple[fx.GraphModule, nn.Module | None]:
    """Split the module that computes the output of a graph, if it may belong to a head, from what comes before it."""
    output = next(n for n in graph.graph.nodes if n.op == "output")
    node = output.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_module" or node.kwargs or len(node.all_input_nodes) != 1:
        return graph, None
    last = graph.get_submodule(str(node.target))
    kinds = (nn.Linear, BaseLinear, nn.Sequential, IsometryAverage, Ensemble, *AFTER_HEAD)
    if not isinstance(last, kinds) or len(node.users) > 1:
        return graph, None
    body = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    end = next(n for n in body.graph.nodes if n.op == "output")
    end.args = (end.args[0].args[0],)
    body.graph.erase_node(next(n for n in body.graph.nodes if n.name == node.name))
    body.recompile()
    body.training = graph.training
    return body, last


def pairwise_radius(
    logits: Tensor, labels: Tensor, distances: Tensor, lipschitz: float = 1.0, slack: Tensor | float = 0.0
) -> Tensor:
    r"""Radius within which the class of each example cannot change, for a model that ends in a linear layer.

    .. math:: \min_{j \ne t} \frac{\max(0, y_t - y_j - \sqrt 2 \eta)}{L |w_t - w_j|}

    The difference of two logits is linear in the features, with the gradient w_t - w_j. So this holds for every matrix
    W, orthogonal or not, and is at least the radius by the norm of W, as :math:`|w_t - w_j| \le \sqrt 2 |W|`. A class
    whose row equals that of the true one cannot overtake it; it limits nothing, unless its logit is as large.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        distances: Distances :math:`|w_i - w_j|` of the rows of the last matrix, (classes, classes).
        lipschitz: Lipschitz constant L of the features, that is, of what comes before the last layer.
        slack: Bound :math:`\eta` of the l2 error of the logits, for each example or for all.

    >>> rows = torch.eye(2)
    >>> pairwise_radius(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 1]), torch.cdist(rows, rows))
    tensor([1.4142, 0.0000])
    """
    check_logits(logits, labels)
    classes = logits.shape[1]
    if distances.shape != (classes, classes) or not bool((distances >= 0).all()):
        raise ValueError(
            f"distances must be at least 0, of shape ({classes}, {classes}), got shape {tuple(distances.shape)} "
            f"and smallest {distances.min().item() if distances.numel() else None}"
        )
    if not (math.isfinite(lipschitz) and lipschitz > 0):
        raise ValueError(f"lipschitz must be positive and finite, got {lipschitz!r}")
    error = in_double_near(torch.as_tensor(slack))
    if error.shape not in ((), labels.shape) or not bool((error >= 0).all()):
        raise ValueError(
            f"slack must be at least 0, one number or one for each of {tuple(labels.shape)} examples, got {slack!r}"
        )
    radius = pairwise_reach(logits, labels, distances, lipschitz, error).amin(1)
    return rounded_down(radius, logits.dtype).to(logits.device)


def pairwise_reach(logits: Tensor, labels: Tensor, distances: Tensor, lipschitz: float, error: Tensor) -> Tensor:
    """Distance within which each class cannot catch up with the true one, (b, classes), inf for that; in float64.

    It is 0 where a logit is not finite.

    Arguments are those of `pairwise_radius`.
    """
    scores, target, less = in_double_near(logits), labels[:, None], 1 - 8 * _EPS
    target, error = target.to(scores.device), error.to(scores.device)
    lead = scores.gather(1, target) - scores  # (b, classes)
    room = (lead * less - math.sqrt(2) / less * error.reshape(-1, 1)).clamp_min(0)
    apart = in_double_near(distances).to(scores.device)
    rates = torch.where(apart > 0, (lipschitz * apart / less).clamp_min(torch.finfo(apart.dtype).tiny), 0)
    rate = rates[target.squeeze(1)]  # at which each class may catch up, (b, classes)
    reach = (room / rate.where(rate > 0, 1)).clamp_max(torch.finfo(logits.dtype).max)
    reach = torch.where(rate > 0, reach, torch.where(room > 0, math.inf, 0.0))
    return reach.scatter(1, target, math.inf).where(scores.isfinite().all(1, keepdim=True), 0)
