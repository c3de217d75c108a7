"""The algorithm of the paper's Appendix E, step by step as it stands there: the reference for speed, used nowhere else.

It is for square images of even size, as in the paper.
"""

import math

import torch
from torch import Tensor, nn


def cayley(W: Tensor) -> Tensor:
    """The transform with both factors formed, (I + A)^-1 (I - A), on (f, o, i)."""
    if W.ndim == 2:
        return cayley(W[None])[0]
    _, o, i = W.shape
    if i > o:
        return cayley(W.transpose(1, 2)).transpose(1, 2)
    U, V = W[:, :i], W[:, i:]
    eye = torch.eye(i, dtype=W.dtype, device=W.device)[None]
    A = U - U.conj().transpose(1, 2) + V.conj().transpose(1, 2) @ V
    inverse = torch.inverse(eye + A)
    return torch.cat((inverse @ (eye - A), -2 * V @ inverse), dim=1)


class ListingConv2d(nn.Conv2d):
    """Complex FFT of image and kernel, a product per frequency, inverse FFT; stride 2 by moving pixels to channels."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        if stride == 2:
            in_channels, kernel_size = 4 * in_channels, kernel_size // 2
        super().__init__(in_channels, out_channels, kernel_size)
        self.block = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.block == 2:
            x = nn.functional.pixel_unshuffle(x, 2)
        o, i, k, _ = self.weight.shape
        b, _, n, _ = x.shape
        f = n * (n // 2 + 1)
        if not hasattr(self, "shift"):
            index = torch.arange(n).repeat((n, 1))
            turn = torch.exp(-2j * math.pi * ((k - 1) // 2) * (index + index.T) / n)
            self.shift = turn[:, : n // 2 + 1].reshape(f, 1, 1).to(x.device, torch.complex64)
        X = torch.fft.rfft2(x).permute(2, 3, 1, 0).reshape(f, i, b)
        W = self.shift * torch.fft.rfft2(self.weight, (n, n)).reshape(o, i, f).permute(2, 0, 1).conj()
        Y = (cayley(W) @ X).reshape(n, n // 2 + 1, o, b)
        return torch.fft.irfft2(Y.permute(3, 2, 0, 1)) + self.bias[:, None, None]


class ListingLinear(nn.Linear):
    """Linear layer by the same transform."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, cayley(self.weight), self.bias)
