"""Convolution by one matrix for each frequency: its gradient, written by hand, is that which torch finds."""

import pytest
import torch
from torch import Tensor

from orthoconv import planes
from orthoconv.convolutions import convolve
from orthoconv.planes import AxesPlane, FastPlane, MatrixPlane, Plane, VolumePlane

KINDS = [(MatrixPlane, (4, 3)), (AxesPlane, (3, 4)), (FastPlane, (4, 3)), (VolumePlane, (2, 2, 3))]


def made(kind: type[Plane], size: tuple[int, ...], bias: bool) -> tuple[Plane, list[Tensor]]:
    """A plane, and images of two groups of channels, matrices for its frequencies, and a bias."""
    source = torch.Generator().manual_seed(0)
    p = planes._plane(kind, size, torch.float64, torch.device("cpu"))
    x = torch.randn(2, 2 * 2, *size, generator=source, dtype=torch.float64)
    D = torch.randn(len(p), 2, 3, 2, generator=source, dtype=torch.complex128)
    return p, [x, D, *([torch.randn(6, generator=source, dtype=torch.float64)] if bias else [])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_gradients(kind: type[Plane], size: tuple[int, ...], bias: bool) -> None:
    p, inputs = made(kind, size, bias)
    inputs = [t.requires_grad_() for t in inputs]

    def function(*inputs: Tensor) -> Tensor:
        return convolve(p, *inputs)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_all_ways_agree(kind: type[Plane], size: tuple[int, ...], bias: bool) -> None:
    """Piece by piece without gradients, by hand with them, and as torch transforms it: values and gradients agree."""
    p, inputs = made(kind, size, bias)
    with torch.no_grad():
        pieces = convolve(p, *inputs)
    value, pull = torch.func.vjp(lambda *inputs: convolve(p, *inputs), *inputs)
    own = convolve(p, *(leaves := [t.clone().requires_grad_() for t in inputs]))
    torch.testing.assert_close(own, pieces, rtol=0, atol=0)
    torch.testing.assert_close(value, pieces, rtol=1e-13, atol=1e-13)
    grad = torch.ones_like(value).cumsum(-1)
    for mine, theirs in zip(torch.autograd.grad(own, leaves, grad), pull(grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_only_the_gradients_that_are_needed() -> None:
    p, (x, D, bias) = made(AxesPlane, (3, 4), True)
    for k in range(3):
        inputs = [t.clone().requires_grad_(j == k) for j, t in enumerate((x, D, bias))]
        convolve(p, *inputs).sum().backward()
        assert [t.grad is not None for t in inputs] == [j == k for j in range(3)]
