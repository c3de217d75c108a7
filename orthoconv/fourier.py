"""Circular convolutions as one small matrix per frequency (Section 4, Appendix A).

A kernel (o, i, kh, kw) on an image of size (h, w) becomes its *spectrum* (g, f, o, i): for each of g groups
and each frequency f, the matrix that maps the input pixel to the output pixel in the Fourier domain. A real
convolution needs half of the plane only, h rows by w // 2 + 1 columns of frequencies; the rest are conjugates.
Whatever is done to these matrices is done to the convolution: products, adjoints, inverses, singular values.

The convolution is PyTorch's (a cross-correlation) with padding="same", padding_mode="circular". Tap p of a
kernel with k taps reads the pixel at offset ``dilation * p - dilation * (k - 1) // 2``; taps wrap, so a kernel
may be larger than the image.
"""

__all__ = [
    "inverse_conv2d",
    "kernel_of",
    "logabsdet",
    "nearest_kernel",
    "offsets",
    "padding",
    "singular_values",
    "spectral_conv2d",
    "spectral_singular_values",
    "spectrum",
]

from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv import elimination
from orthoconv.convolutions import convolve
from orthoconv.planes import FastPlane

Size = Sequence[int]


def spectrum(weight: Tensor, size: Size, *, dilation: int | Size = 1, groups: int = 1) -> Tensor:
    """Matrices of a circular convolution in the Fourier domain (Corollary A.1.1).

    A kernel of one tap has the same real matrix at every frequency; that matrix is returned once, f = 1.

    Arguments:
        weight: Kernel, of shape (o, i / groups, kh, kw).
        size: Height and width of the image.

    Returns:
        Shape (groups, f, o / groups, i / groups), complex with f = h * (w // 2 + 1), or real with f = 1.

    >>> spectrum(torch.randn(16, 8, 3, 3), (32, 32)).shape
    torch.Size([1, 544, 16, 8])
    """
    if isinstance(size, int) or len(size) != 2 or weight.ndim != 4 or weight.shape[0] % groups:
        raise ValueError(
            f"a spectrum needs a kernel (o, i, kh, kw) whose o is a multiple of groups, and an image size (h, w); "
            f"got {tuple(weight.shape)}, groups={groups}, {size!r}"
        )
    (h, w), (dh, dw) = size, _pair(dilation)
    o, i, kh, kw = weight.shape
    taps = weight.permute(2, 3, 0, 1).flatten(0, 1).flatten(1)  # (kh kw, o i)
    if all(k == 1 or n == 1 for k, n in zip((kh, kw), size, strict=True)):
        D = taps.sum(0, keepdim=True)  # (1, o i)
    else:
        P = FastPlane((h, w)).phases(offsets(kh, dh), offsets(kw, dw))  # (f, kh kw)
        D = torch.complex(P.real.to(taps) @ taps, P.imag.to(taps) @ taps)  # (f, o i)
    return D.view(-1, groups, o // groups, i).transpose(0, 1)  # (g, f, o, i)


def kernel_of(D: Tensor, size: Size) -> Tensor:
    """Kernel of a spectrum, as large as the image and centred: the inverse of `spectrum`.

    Arguments:
        D: Spectrum, of shape (g, f, o, i).
        size: Height and width of the image, which are also those of the kernel.

    Returns:
        Shape (g o, i, h, w); ``spectrum(kernel_of(D, size), size, groups=g)`` is `D` at every frequency.

    >>> kernel_of(spectrum(torch.ones(1, 1, 1, 1), (3, 3)), (3, 3)).squeeze()
    tensor([[0., 0., 0.],
            [0., 1., 0.],
            [0., 0., 0.]])
    """
    h, w = size
    f = h * (w // 2 + 1)
    D = D.expand(-1, f, -1, -1).permute(0, 2, 3, 1).flatten(0, 1)  # (o, i, f)
    offsets: Tensor = torch.fft.irfft2(D.conj().unflatten(2, (h, w // 2 + 1)).resolve_conj(), s=(h, w))
    return offsets.roll(((h - 1) // 2, (w - 1) // 2), dims=(-2, -1))  # (o, i, h, w)


def nearest_kernel(D: Tensor, size: Size, taps: Size, *, dilation: int | Size = 1) -> Tensor:
    """Kernel with so many taps whose spectrum is nearest to `D` (g, f, o, i), in the sense of least squares.

    Arguments:
        D: Spectrum (g, f, o, i).
        size: Height and width of the image.
        taps: Height and width of the kernel.
        dilation: Distance of the taps.

    >>> weight = torch.randn(4, 3, 3, 2)
    >>> torch.allclose(nearest_kernel(spectrum(weight, (5, 6)), (5, 6), (3, 2)), weight, atol=1e-5)
    True
    """
    rows, columns = ((offsets(k, d) + (n - 1) // 2) % n for k, d, n in zip(taps, _pair(dilation), size, strict=True))
    times = [torch.stack([(t == at).sum() for at in t]) for t in (rows, columns)]  # taps that wrap to one pixel
    whole = kernel_of(D, size)
    shared = (times[0][:, None] * times[1]).to(whole)
    return whole[..., rows[:, None].to(D.device), columns.to(D.device)] / shared


def spectral_conv2d(x: Tensor, D: Tensor) -> Tensor:
    """Convolution of images by a spectrum: FFT, one matrix product per frequency, inverse FFT.

    The adjoint convolution is ``spectral_conv2d(y, D.mH)``.

    Arguments:
        x: Images, of shape (b, g i, h, w).
        D: Spectrum for images of that size, of shape (g, f, o, i).

    Returns:
        Shape (b, g o, h, w).

    >>> x, weight = torch.randn(1, 3, 6, 5), torch.randn(4, 3, 3, 3)
    >>> spectral_conv2d(x, spectrum(weight, (6, 5))).shape
    torch.Size([1, 4, 6, 5])
    """
    g, _, o, i = D.shape
    if not D.is_complex() or len(x) == 0:  # the same matrix for every pixel, or no pixel at all
        return torch.conv2d(x, D[:, 0].real.reshape(g * o, i, 1, 1), groups=g)
    h, w = x.shape[-2:]
    return convolve(FastPlane((h, w)), x, D.transpose(0, 1))


def inverse_conv2d(y: Tensor, weight: Tensor, *, dilation: int | Size = 1, groups: int = 1) -> Tensor:
    """Images x whose circular convolution by `weight` is `y` (Section 4, the inverse convolution).

    Arguments:
        y: Images, of shape (b, o, h, w).
        weight: Kernel with as many input as output channels, of shape (o, o / groups, kh, kw).

    >>> weight = torch.randn(3, 3, 3, 3, dtype=torch.float64)
    >>> y = torch.randn(1, 3, 8, 7, dtype=torch.float64)
    >>> x = inverse_conv2d(y, weight)
    >>> torch.dist(spectral_conv2d(x, spectrum(weight, (8, 7))), y).item() < 1e-9
    True
    """
    D = spectrum(weight, y.shape[-2:], dilation=dilation, groups=groups)
    _require_square(D, "inverse_conv2d")
    return spectral_conv2d(y, elimination.inverse(D, check=True))


def singular_values(weight: Tensor, size: Size, *, dilation: int | Size = 1, groups: int = 1) -> Tensor:
    """All singular values of a circular convolution, by frequency.

    Returns:
        Shape (h, w, r), r = groups * min(o, i) / groups values for each frequency, in descending order.

    Arguments:
        weight: Kernel (o, i / groups, kh, kw).
        size: Height and width of the image.
        dilation: Distance of the taps.
        groups: Number of blocks of channels.

    >>> singular_values(torch.ones(1, 1, 3, 3), (4, 5)).max()
    tensor(9.)
    """
    return spectral_singular_values(spectrum(weight, size, dilation=dilation, groups=groups), size)


def spectral_singular_values(D: Tensor, size: Size) -> Tensor:
    """`singular_values` of the convolution whose spectrum is `D`.

    Arguments:
        D: Spectrum (g, f, o, i).
        size: Height and width of the image.

    >>> spectral_singular_values(spectrum(torch.ones(1, 1, 1, 1), (2, 2)), (2, 2)).shape
    torch.Size([2, 2, 1])
    """
    values = torch.linalg.svdvals(D).transpose(0, 1).flatten(1)  # (f, r)
    return _whole_plane(values.sort(descending=True).values, size)


def logabsdet(weight: Tensor, size: Size, *, dilation: int | Size = 1, groups: int = 1) -> Tensor:
    """Logarithm of the absolute determinant of a circular convolution with equal channels.

    Arguments:
        weight: Kernel (o, i / groups, kh, kw).
        size: Height and width of the image.
        dilation: Distance of the taps.
        groups: Number of blocks of channels.

    >>> round(logabsdet(torch.eye(2)[..., None, None] * torch.e, (4, 5)).item(), 3)
    40.0
    """
    D = spectrum(weight, size, dilation=dilation, groups=groups)
    _require_square(D, "logabsdet")
    values = elimination.logabsdet(D).transpose(0, 1)  # (f, g)
    return _whole_plane(values, size).sum()


def offsets(k: int, dilation: int) -> Tensor:
    """Pixels that the `k` taps of a kernel read, relative to the centre.

    Arguments:
        k: Number of taps.
        dilation: Distance of the taps.

    >>> offsets(3, 1), offsets(4, 2)
    (tensor([-1,  0,  1]), tensor([-3, -1,  1,  3]))
    """
    return dilation * torch.arange(k) - dilation * (k - 1) // 2


def padding(k: Size, dilation: Size) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns that a kernel with `k` taps reads before a pixel, and after it.

    Arguments:
        k: Numbers of taps, of rows and of columns.
        dilation: Distances of the taps.

    >>> padding((3, 4), (1, 1))
    ((1, 1), (1, 2))
    """
    spans = dilation[0] * (k[0] - 1), dilation[1] * (k[1] - 1)
    before = spans[0] // 2, spans[1] // 2
    return before, (spans[0] - before[0], spans[1] - before[1])


def _whole_plane(values: Tensor, size: Size) -> Tensor:
    """Conjugate-symmetric `values` on the half plane (f, r), or on one frequency, to (h, w, r)."""
    h, w = size
    half = values.expand(h * (w // 2 + 1), -1).unflatten(0, (h, w // 2 + 1))
    u, v = -torch.arange(h) % h, w - torch.arange(w // 2 + 1, w)
    return torch.cat((half, half[u[:, None], v]), dim=1)


def _require_square(D: Tensor, name: str) -> None:
    g, _, o, i = D.shape
    if o != i:
        raise ValueError(f"{name} needs as many input as output channels, got {g * i} -> {g * o}")


def _pair(value: int | Size) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
