"""Models that are a weighted sum of chains of affine functions and MaxMin, taken apart for local certificates."""

__all__ = ["Branch", "branches_of", "require_sum"]

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from orthoconv.certificates.trust import is_plain
from orthoconv.linalg import row_norms
from orthoconv.modules import compiled_from
from orthoconv.nn.activation import MaxMin
from orthoconv.nn.affine import Gain, Shift
from orthoconv.nn.centering import BatchCentering, LayerCentering, PixelBias
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.nn.downsample import InvertibleDownsample, InvertibleUpsample
from orthoconv.nn.ensemble import Ensemble
from orthoconv.nn.isometry import IsometryAverage, Mirror, Move
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.normalize import Normalize, Scale
from orthoconv.nn.pooling import ScaledAdaptiveAvgPool2d, ScaledAvgPool2d, ScaledMean
from orthoconv.nn.shuffle import ChannelShuffle

_AFFINE: tuple[type[nn.Module], ...] = (
    BaseConv2d, BaseLinear, BatchCentering, ChannelShuffle, Gain, InvertibleDownsample, InvertibleUpsample,
    LayerCentering, Mirror, Move, Normalize, PixelBias, Scale, ScaledAdaptiveAvgPool2d, ScaledAvgPool2d, ScaledMean,
    Shift, nn.Conv2d, nn.Dropout, nn.Flatten, nn.Identity, nn.Linear, nn.Unflatten,
)  # fmt: skip


class Branch(NamedTuple):
    """A chain of affine functions, with MaxMin between each two of them, and its share in the mean that a model is.

    Attributes:
        share: Factor of its logits.
        segments: The affine functions, in float64.
        sorts: The MaxMin between them.
        bounds: Lipschitz bound of what comes before each MaxMin.
    """

    share: float
    segments: list[nn.Sequential]
    sorts: list[MaxMin]
    bounds: list[float]

    def outputs(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the inputs of the segments, and their outputs, which are functions of these for autograd."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for k, segment in enumerate(self.segments):
            y = self.sorts[k - 1](outputs[-1].detach()) if k else x
            inputs.append(y.detach().requires_grad_())
            with torch.enable_grad():
                outputs.append(segment(inputs[-1]))
        return inputs, outputs


_Row = tuple[nn.Module, nn.Module]  # a layer, and the same in float64


def branches_of(model: nn.Module, exact: nn.Module, bound: Callable[[nn.Module], float]) -> list[Branch]:
    """Take a model apart into the chains whose weighted sum it is.

    Arguments:
        model: Affine layers and MaxMin in a row, or an `IsometryAverage` or `Ensemble` of such models.
        exact: The same in float64, as `in_double` makes it.
        bound: Function that returns the Lipschitz bound of a part of the model that begins where the model does.

    Raises:
        TypeError: If the model has a part that is neither affine nor MaxMin; the error names it.
    """
    _require_own_gradients(model)
    bound_of = cache(lambda *layers: bound(nn.Sequential(*layers)))  # an image and its mirror image share their layers
    return [_branch(share, rows, bound_of) for share, rows in _paths(model, exact)]


def _branch(share: float, rows: list[_Row], bound_of: Callable[..., float]) -> Branch:
    layers, twins = [layer for layer, _ in rows], [twin for _, twin in rows]
    for layer in layers:
        if not _is(layer, MaxMin, *_AFFINE):
            raise TypeError(
                f"local certificates are for affine layers and MaxMin in an nn.Sequential, got {type(layer).__name__}; "
                f"leave local=True out for this model"
            )
    places = [k for k, layer in enumerate(layers) if isinstance(layer, MaxMin)]
    ends = [-1, *places, len(layers)]
    segments = [nn.Sequential(*twins[first + 1 : last]) for first, last in pairwise(ends)]
    before = [[m for m in layers[:k] if not isinstance(m, Mirror)] for k in places]
    sorts = [layer for layer in layers if isinstance(layer, MaxMin)]
    return Branch(share, segments, sorts, [bound_of(*part) for part in before])


def _paths(model: nn.Module, exact: nn.Module) -> list[tuple[float, list[_Row]]]:
    """Return the rows of layers whose sum, each times its factor, a model is."""
    paths: list[tuple[float, list[_Row]]] = [(1.0, [])]
    for layer, twin in _rows(model, exact):
        parts = list(_parts(layer, twin))
        if len(paths) > 1 and any(isinstance(m, MaxMin) for _, rows in parts for m, _ in rows):
            raise TypeError(
                "local certificates are for means of networks, got MaxMin after a mean; leave out local=True"
            )
        paths = [(s * t, [*a, *b]) for s, a in paths for t, b in parts]
    return paths


def _rows(model: nn.Module, exact: nn.Module) -> Iterator[_Row]:
    """Yield the layers of an `nn.Sequential`, nested or not, each with its twin, which may be several in float64."""
    original = compiled_from(model)
    model = model if original is None else original
    if isinstance(model, nn.Sequential) and is_plain(model, nn.Sequential):
        for layer, twin in zip(model._modules.values(), exact._modules.values(), strict=True):
            assert layer is not None
            assert twin is not None
            yield from _rows(layer, twin)
    else:
        yield model, exact


def _parts(layer: nn.Module, twin: nn.Module) -> Iterator[tuple[float, list[_Row]]]:
    if isinstance(layer, Ensemble) and is_plain(layer, Ensemble) and isinstance(twin, Ensemble):
        for member, other in zip(layer.members, twin.members, strict=True):
            yield from ((share / len(layer.members), rows) for share, rows in _paths(member, other))
    elif isinstance(layer, IsometryAverage) and is_plain(layer, IsometryAverage) and isinstance(twin, IsometryAverage):
        for share, rows in _paths(layer.f, twin.f):
            share /= len(layer.maps) + 1
            yield share, rows
            yield from ((share, [pair, *rows]) for pair in zip(layer.maps, twin.maps, strict=True))
    else:
        yield 1.0, [(layer, twin)]


def _is(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) and is_plain(layer, kind) for kind in kinds)


def _require_own_gradients(model: nn.Module) -> None:
    """Refuse hooks that may change the gradients that a certificate rests on."""
    hooked = [m for m in model.modules() if m._backward_hooks or m._backward_pre_hooks]
    if hooked or torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        name = type(hooked[0]).__name__ if hooked else "all modules"
        raise TypeError(f"local certificates rest on gradients, and {name} has backward hooks; remove them")


def require_sum(branches: Sequence[Branch], exact: nn.Module, x: Tensor, error: Callable[[Tensor], Tensor]) -> None:
    """Raise an error if the branches are not the model in float64, at some inputs: then it was taken apart wrongly."""
    total = sum(branch.share * branch.outputs(x)[1][-1].detach() for branch in branches)
    if not bool((row_norms(total - exact(x.clone())) <= 4 * error(row_norms(x))).all()):
        raise TypeError("the layers of this model, one after another, are not what it computes; leave out local=True")
