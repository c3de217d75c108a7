"""Convolution of large images tile by tile, with the matrices of a small torus.

The kernel of a Cayley transform is as large as the image, but its taps decay with their distance from the centre. So
the kernel is found on a torus of t x t pixels, where there are few matrices to keep, and cut to the taps within t / 4.
Tiles of t x t pixels overlap by a half. The middle of each sees the cut kernel alone, and nothing of its borders.

What is lost by the cut is measured: `deviation` compares the cut kernel with the transform at every frequency of the
large image.
"""

__all__ = ["convolve_tiles", "cut_kernel", "deviation"]

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.convolutions import convolve
from orthoconv.nn.arguments import Pair
from orthoconv.planes import plane

_ROWS = 8  # of frequencies that are compared at once


def convolve_tiles(x: Tensor, D: Tensor, t: int, bias: Tensor | None = None) -> Tensor:
    """Convolve (b, g i, h, w), of at least t x t pixels, by the matrices D (f, g, o, i) of a cut kernel.

    >>> D = torch.eye(3, dtype=torch.complex64).expand(16 * 9, 1, 3, 3)  # one tap, the identity
    >>> x = torch.randn(1, 3, 20, 17)
    >>> torch.allclose(convolve_tiles(x, D, 16), x, atol=1e-5)
    True
    """
    (b, c, h, w), step, margin = x.shape, t // 2, t // 4
    rows, columns = -(-h // step), -(-w // step)
    around = (margin, columns * step - w + margin, margin, rows * step - h + margin)
    tiles = F.pad(x, around, mode="circular").unfold(2, t, step).unfold(3, t, step)
    tiles = tiles.permute(0, 2, 3, 1, 4, 5).reshape(-1, c, t, t)
    y = convolve(plane((t, t), x.dtype, x.device), tiles, D, bias)[..., margin : margin + step, margin : margin + step]
    y = y.unflatten(0, (b, rows, columns)).permute(0, 3, 1, 4, 2, 5).reshape(b, -1, rows * step, columns * step)
    cropped: Tensor = y[..., :h, :w]
    return cropped


def cut_kernel(D: Tensor, t: int) -> Tensor:
    """Set the taps beyond t / 4 to zero, in place, in the kernel with the matrices D (f, g, o, i) on t x t pixels."""
    far = torch.arange(t // 4 + 1, t - t // 4, device=D.device)
    for row in D.unflatten(0, (t, t // 2 + 1)).unbind(-2):
        kernel = torch.fft.irfft2(row, s=(t, t), dim=(0, 1))
        kernel[far] = 0
        kernel[:, far] = 0
        row.copy_(torch.fft.rfft2(kernel, dim=(0, 1)))
    return D


def deviation(D: Tensor, t: int, exact: Callable[[slice], Tensor], size: Pair) -> Tensor:
    """Largest Frobenius norm of a matrix of the cut kernel minus the exact one, over all frequencies of larger images.

    Arguments:
        D: Matrices (f, g, o, i) of the cut kernel on t x t pixels.
        t: Side of a tile.
        exact: Function of a slice of the frequencies of the plane of images of that size; returns matrices (f g, o, i).
        size: Height and width of the images.
    """
    (h, w), near = size, torch.arange(-(t // 4), t // 4 + 1)
    columns, shape = w // 2 + 1, D.shape[1:]
    kernel = torch.fft.irfft2(D.unflatten(0, (t, t // 2 + 1)), s=(t, t), dim=(0, 1))[near % t][:, near % t].flatten(2)
    R, C = (_roots(torch.arange(n), near, side).to(D) for n, side in ((h, h), (columns, w)))
    largest: Tensor = kernel.new_zeros(())
    for u in range(0, h, _ROWS):
        lines = torch.view_as_real(R[u : u + _ROWS].mT).flatten(1).mT @ kernel.flatten(1)  # real and imaginary parts
        lines = torch.complex(*lines.unflatten(0, (-1, 2)).unbind(1)).unflatten(1, (len(near), -1))
        cut = (C @ lines).view(-1, *shape[1:])
        difference = torch.linalg.matrix_norm(cut - exact(slice(u * columns, min(u + _ROWS, h) * columns)))
        largest = torch.maximum(largest, difference.max())
    return largest


def _roots(frequencies: Tensor, offsets: Tensor, n: int) -> Tensor:
    """exp(-2 pi i f r / n) in double precision, (f, r)."""
    angle = (frequencies[:, None] * offsets % n).double() * (-2 * torch.pi / n)
    return torch.complex(angle.cos(), angle.sin())
