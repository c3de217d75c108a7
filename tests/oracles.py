"""Dense matrices of circular convolutions by their definition, index by index: no FFT, no library convolution."""

import itertools

import torch
from torch import Tensor


def pixels(h: int, w: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of all pixels of an image."""
    return torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)


def conv_matrix(weight: Tensor, size: tuple[int, int], dilation: tuple[int, int] = (1, 1)) -> Tensor:
    """Matrix (o h w, i h w) of the circular convolution by `weight` (o, i, kh, kw), one group."""
    (h, w), (dh, dw) = size, dilation
    o, i, kh, kw = weight.shape
    C = weight.new_zeros(o, h, w, i, h, w)
    a, b = pixels(h, w)
    for p, q in itertools.product(range(kh), range(kw)):
        row = (a + dh * p - dh * (kh - 1) // 2) % h
        column = (b + dw * q - dw * (kw - 1) // 2) % w
        C[:, a, b, :, row, column] += weight[:, :, p, q]
    return C.reshape(o * h * w, i * h * w)


def strided_matrix(
    weight: Tensor, size: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int] = (1, 1)
) -> Tensor:
    """Matrix (o h w / stride, i h w) of the strided circular convolution by `weight`, centred on blocks of pixels."""
    (h, w), (sh, sw), (dh, dw) = size, stride, dilation
    o, i, kh, kw = weight.shape
    C = weight.new_zeros(o, h // sh, w // sw, i, h, w)
    a, b = pixels(h // sh, w // sw)
    for p, q in itertools.product(range(kh), range(kw)):
        row = (sh * a + dh * p - (dh * (kh - 1) - sh + 1) // 2) % h
        column = (sw * b + dw * q - (dw * (kw - 1) - sw + 1) // 2) % w
        C[:, a, b, :, row, column] += weight[:, :, p, q]
    return C.reshape(o * h * w // (sh * sw), i * h * w)


def downsample_matrix(channels: int, size: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Permutation matrix that moves blocks of pixels of (c, h, w) to channels ordered (c, row, column)."""
    (h, w), (sh, sw) = size, block
    P = torch.zeros(channels, sh, sw, h // sh, w // sw, channels, h, w, dtype=torch.float64)
    a, b = pixels(h, w)
    for c in range(channels):
        P[c, a % sh, b % sw, a // sh, b // sw, c, a, b] = 1
    return P.reshape(channels * h * w, channels * h * w)


def grouped(weight: Tensor, groups: int, matrix) -> Tensor:
    """Block-diagonal matrix of `matrix(kernel)` for the kernel of each group."""
    return torch.block_diag(*(matrix(kernel) for kernel in weight.chunk(groups)))


def polar(W: Tensor) -> Tensor:
    """Orthogonal matrix nearest to W, by its singular vectors."""
    U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    return U @ Vh


def padded_cayley(W: Tensor) -> Tensor:
    """Pad with zeros to a square, transform the skew part, and cut: the definition in Appendix A.1."""
    m, n = W.shape
    B = W.new_zeros(max(m, n), max(m, n))
    B[:m, :n] = W
    eye = torch.eye(len(B), dtype=W.dtype)
    return torch.linalg.solve(eye + B - B.mT, eye - B + B.mT)[:m, :n]


def bcop_kernel(H: Tensor, Ns: list[Tensor], taps: tuple[int, int]) -> Tensor:
    """Kernel (m, c, kh, kw): H times the product of filters with the taps P, I - P, tap by tap.

    The filters go down and across in turn, as the 2 x 2 blocks of the BCOP paper do.
    """
    kh, kw = taps
    eye = torch.eye(H.shape[1], dtype=H.dtype)
    kernel = {(0, 0): H}
    down, across = [N @ N.mT for N in Ns[: kh - 1]], [N @ N.mT for N in Ns[kh - 1 :]]
    for step in range(max(len(down), len(across))):
        for filters, (a, b) in ((down, (1, 0)), (across, (0, 1))):
            if step < len(filters):
                P, product = filters[step], {}
                for (p, q), K in kernel.items():
                    product[p, q] = product.get((p, q), 0) + K @ P
                    product[p + a, q + b] = product.get((p + a, q + b), 0) + K @ (eye - P)
                kernel = product
    return torch.stack([torch.stack([kernel[p, q] for q in range(kw)], -1) for p in range(kh)], -2)


def power_method(C: Tensor, iterations: int) -> float:
    """Norm of C after so many iterations from the chirp that OSSN starts with."""
    n = torch.arange(C.shape[1], dtype=torch.float64)
    u = (n * n * 0.6180339887498949).cos()
    for _ in range(iterations):
        u = C.mT @ (C @ u)
        u = u / u.norm()
    return (C @ u).norm().item()
