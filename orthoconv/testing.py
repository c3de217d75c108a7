"""Checks that a layer is what it says, by its action alone: nothing here looks inside the layer."""

__all__ = [
    "assert_nonexpansive",
    "assert_orthogonal",
    "dense_matrix",
    "norm_ratios",
    "orthogonality_error",
]

from collections.abc import Callable, Sequence

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
