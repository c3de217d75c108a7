"""Checks of any layer by its action alone: its dense matrix, its norms, and what it promises."""

__all__ = [
    "assert_nonexpansive",
    "assert_orthogonal",
    "check_layer",
    "dense_matrix",
    "norm_ratios",
    "orthogonality_error",
]

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Layer = Callable[[Tensor], Tensor]

_CHUNK = 1024  # unit inputs sent through the layer at once


@torch.no_grad()
def dense_matrix(layer: Layer, input_shape: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
    """Matrix (outputs, inputs) of an affine layer, by its response to each unit input.

    Arguments:
        layer: Affine map of batches; its constant part is subtracted.
        input_shape: Shape of one input, without the batch.
        dtype: That of the inputs; by default that of the layer's parameters.

    >>> dense_matrix(nn.Linear(2, 3), (2,)).shape
    torch.Size([3, 2])
    """
    dtype, device = _kind(layer, dtype)
    n = torch.Size(input_shape).numel()
    inputs = torch.eye(n, dtype=dtype, device=device).view(n, *input_shape)
    constant = layer(torch.zeros_like(inputs[:1]))
    return torch.cat([(layer(x) - constant).flatten(1) for x in inputs.split(_CHUNK)]).mT


def orthogonality_error(layer: Layer | Tensor, input_shape: Sequence[int] | None = None) -> float:
    """Largest distance of a singular value of the layer, or of a matrix, from 1.

    Arguments:
        layer: Affine map of batches, or a matrix.
        input_shape: Shape of one input of a layer, without the batch.

    >>> orthogonality_error(2 * torch.eye(3))
    1.0
    """
    return float((_singular_values(layer, input_shape) - 1).abs().max())


def assert_orthogonal(
    layer: Layer | Tensor, input_shape: Sequence[int] | None = None, *, atol: float | None = None
) -> None:
    """Raise an AssertionError unless every singular value is 1, up to `atol` (by default 10 n eps).

    Arguments:
        layer: Affine map of batches, or a matrix.
        input_shape: Shape of one input of a layer, without the batch.
        atol: Distance from 1 that is allowed.

    >>> assert_orthogonal(torch.eye(3))
    >>> assert_orthogonal(2 * torch.eye(3))
    Traceback (most recent call last):
    ...
    AssertionError: not orthogonal: singular values in [2, 2], not within 3.58e-06 of 1
    """
    values = _singular_values(layer, input_shape)
    atol = _tolerance(values) if atol is None else atol
    if not bool(((values - 1).abs() <= atol).all()):
        raise AssertionError(
            f"not orthogonal: singular values in [{values.min():.9g}, {values.max():.9g}], not within {atol:.3g} of 1"
        )


def assert_nonexpansive(
    layer: Layer | Tensor, input_shape: Sequence[int] | None = None, *, atol: float | None = None
) -> None:
    """Raise an AssertionError unless every singular value is at most 1, up to `atol` (by default 10 n eps).

    Arguments:
        layer: Affine map of batches, or a matrix.
        input_shape: Shape of one input of a layer, without the batch.
        atol: Excess over 1 that is allowed.

    >>> assert_nonexpansive(torch.eye(3) / 2)
    """
    values = _singular_values(layer, input_shape)
    atol = _tolerance(values) if atol is None else atol
    if not bool((values <= 1 + atol).all()):
        raise AssertionError(f"expansive: largest singular value {values.max():.9g}, more than {atol:.3g} above 1")


@torch.no_grad()
def norm_ratios(layer: Layer, x: Tensor) -> Tensor:
    """|L x| / |x| for each example of the batch, where L is the linear part of the layer (Figure 1).

    Arguments:
        layer: Affine map of batches.
        x: Inputs (b, ...), none of them zero.

    Returns:
        Shape (b,), in float64.

    >>> norm_ratios(nn.Identity(), torch.ones(2, 3))
    tensor([1., 1.], dtype=torch.float64)
    """
    y = layer(x) - layer(torch.zeros_like(x[:1]))
    after, before = (torch.linalg.vector_norm(t.flatten(1).double(), dim=1) for t in (y, x))
    return torch.div(after, before)


def check_layer(layer: nn.Module, input_shape: Sequence[int], *, atol: float | None = None) -> None:
    """Raise an AssertionError unless a layer keeps its promises: the contract of `orthoconv.nn.Layer`.

    The dense matrix of an affine layer, or random pairs of inputs of another one, are compared with what the layer
    says: its promise, its Lipschitz bound, its singular values, its float64 copy and its exported form.

    Arguments:
        layer: Layer that answers the questions of `orthoconv.nn.Layer`; float64 makes the test sharp.
        input_shape: Shape of one input, without the batch; a small one, since the matrix is formed.
        atol: Difference that is allowed; by default 100 n eps for n inputs.

    >>> from orthoconv.nn import CayleyConv2d
    >>> check_layer(CayleyConv2d(2, 3, 3, dtype=torch.float64), (2, 4, 4))
    """
    own: Any = copy.deepcopy(layer).eval()
    dtype, device = _kind(own, None)
    shape, n = tuple(input_shape), torch.Size(input_shape).numel()
    atol = 100 * n * torch.finfo(dtype).eps if atol is None else atol
    x = torch.randn(8, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with torch.no_grad():
        y, zero = own(x), own(torch.zeros_like(x))
        affine = bool(((y + own(-x) - 2 * zero).abs() <= atol * (1 + y.abs().max())).all())
        values = torch.linalg.svdvals(dense_matrix(own, shape)) if affine else _ratios(own, x)
        for name, other in (("in_double()", own.in_double()), ("exported()", own.exported(shape))):
            seen = other(x.double()) if name == "in_double()" else other(x)
            _require((seen - y).abs().max(), atol * float(1 + y.abs().max()), f"{name} computes something else")
    _require(float(values.max()) - own.lipschitz(shape), atol, f"the bound {own.lipschitz(shape):.9g} is too small")
    if own.promise is not None:
        _require(float(values.max()) - 1, atol, f"the layer promises to be {own.promise}, and expands")
    if own.promise == "orthogonal" and affine:
        _require((values - 1).abs().max(), atol, "the layer promises to be orthogonal, and is not")
    said = own.singular_values_for(shape) if affine and hasattr(own, "singular_values_for") else None
    if said is not None:
        first, second = (v.double().cpu().flatten().sort(descending=True).values for v in (said, values))
        n = min(len(first), len(second))
        _require((first[:n] - second[:n]).abs().max(), atol, "singular_values_for says something else")


def _ratios(layer: Layer, x: Tensor) -> Tensor:
    """Ratios of distances after and before, for pairs of inputs."""
    y = layer(x)
    after, before = (torch.linalg.vector_norm((t - t.roll(1, 0)).flatten(1), dim=1) for t in (y, x))
    return torch.div(after, before)


def _require(excess: Tensor | float, atol: float, fault: str) -> None:
    if not float(excess) <= atol:
        raise AssertionError(f"{fault}: by {float(excess):.3g}, more than {atol:.3g}")


def _singular_values(layer: Layer | Tensor, input_shape: Sequence[int] | None) -> Tensor:
    if isinstance(layer, Tensor):
        matrix = layer.detach()
    elif input_shape is None:
        raise ValueError("input_shape is needed to find the matrix of a layer, got None")
    else:
        matrix = dense_matrix(layer, input_shape)
    if not bool(torch.isfinite(matrix).all()):
        raise AssertionError(f"the matrix of the layer has non-finite entries, of {tuple(matrix.shape)}")
    values: Tensor = torch.linalg.svdvals(matrix)
    return values


def _tolerance(values: Tensor) -> float:
    return 10 * values.shape[-1] * torch.finfo(values.dtype).eps


def _kind(layer: Layer, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.device]:
    found = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    if found is None:
        return dtype or torch.get_default_dtype(), torch.device("cpu")
    return dtype or found.dtype, found.device
