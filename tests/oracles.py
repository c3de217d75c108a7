"""Dense matrices of circular convolutions by their definition, index by index: no FFT, no library convolution."""

import itertools

import torch
from torch import Tensor


def conv_matrix(weight: Tensor, size: tuple[int, int], dilation: tuple[int, int] = (1, 1)) -> Tensor:
    """Matrix (o h w, i h w) of the circular convolution by `weight` (o, i, kh, kw), one group."""
    (h, w), (dh, dw) = size, dilation
    o, i, kh, kw = weight.shape
    C = weight.new_zeros(o, h, w, i, h, w)
    for a, b, p, q in itertools.product(range(h), range(w), range(kh), range(kw)):
        row = (a + dh * p - dh * (kh - 1) // 2) % h
        column = (b + dw * q - dw * (kw - 1) // 2) % w
        C[:, a, b, :, row, column] += weight[:, :, p, q]
    return C.reshape(o * h * w, i * h * w)


def downsample_matrix(channels: int, size: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Permutation matrix that moves blocks of pixels of (c, h, w) to channels ordered (c, row, column)."""
    (h, w), (sh, sw) = size, block
    P = torch.zeros(channels, sh, sw, h // sh, w // sw, channels, h, w, dtype=torch.float64)
    for c, a, b in itertools.product(range(channels), range(h), range(w)):
        P[c, a % sh, b % sw, a // sh, b // sw, c, a, b] = 1
    return P.reshape(channels * h * w, channels * h * w)


def grouped(weight: Tensor, groups: int, matrix) -> Tensor:
    """Block-diagonal matrix of `matrix(kernel)` for the kernel of each group."""
    return torch.block_diag(*(matrix(kernel) for kernel in weight.chunk(groups)))
