"""The Fourier plane of images of one size, frequency by frequency: what a spectral convolution computes with.

A real image of h x w pixels has conjugate-symmetric coefficients, so about half of the plane is enough. Small images
are transformed by one product with a real matrix, whose rows are the cosines and sines of just the frequencies that
differ; middle ones by a product for each axis, on a CPU; larger ones by the fast Fourier transform. The crossovers were
measured (docs/performance.md).
"""

from __future__ import annotations

__all__ = [
    "COMPLEX",
    "FastPlane",
    "Pair",
    "Plane",
    "VolumePlane",
    "chunks",
    "is_plain",
    "plane",
    "transform_units",
]

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.products import product
from orthoconv.tracing import is_concrete, tensor_cache

Pair = tuple[int, int]
Multiply = Callable[[Tensor, Tensor], Tensor]

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class Plane(ABC):
    """Frequencies (u, v), f of them, that determine a real image; abstract.

    Coefficients are kept in the order in which they are fastest to find; `take` and `put` move those of some
    frequencies from and to matrices (f g, b, c): pixels of a batch for each frequency and group of channels.
    """

    def __init__(self, size: Pair, u: Tensor, v: Tensor, weight: Tensor) -> None:
        self.size, self.u, self.v = size, u, v
        self.scale = weight.double() / (size[0] * size[1])  # adjoint of the transform times this: its inverse

    def __len__(self) -> int:
        return len(self.u)

    def matrices(self, taps: Tensor, *offsets: Tensor) -> Tensor:
        """Sums (f, ...) over the taps (r c, ...) at these offsets of rows and columns, each times its phase."""
        P = self.phases(*offsets).to(taps.device, COMPLEX[taps.dtype])
        return (P @ taps.flatten(1).to(P.dtype)).view(len(self), *taps.shape[1:])

    def whole(self, D: Tensor) -> Tensor:
        """Values (f, ...) on the plane, to those on the h rows and w // 2 + 1 columns of the fast transform."""
        h, w = self.size
        u, v = (axis.flatten() for axis in torch.meshgrid(torch.arange(h), torch.arange(w // 2 + 1), indexing="ij"))
        place = torch.full((h, w // 2 + 1), -1)
        place[self.u, self.v] = torch.arange(len(self))
        conjugate = place[u, v] < 0
        index = torch.where(conjugate, place[-u % h, v], place[u, v]).to(D.device)
        return torch.where(conjugate.to(D.device).view(-1, *[1] * (D.ndim - 1)), D[index].conj(), D[index])

    def phases(self, *offsets: Tensor) -> Tensor:
        """exp(2 pi i (u r / h + v c / w)) in double precision for offsets r and c: (f, r c)."""
        (h, w), (rows, columns) = self.size, offsets
        R, C = (_roots(turns, n) for turns, n in ((self.u[:, None] * rows, h), (self.v[:, None] * columns, w)))
        return (R[:, :, None] * C[:, None]).flatten(1)

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:
        """Coefficients of images (b, c, h, w)."""

    @abstractmethod
    def invert(self, X: Tensor) -> Tensor:
        """Images (b, c, h, w) of coefficients."""

    @abstractmethod
    def empty(self, x: Tensor, channels: int) -> Tensor:
        """Room for the coefficients of as many images as `x` has, of so many channels."""

    @abstractmethod
    def take(self, X: Tensor, some: slice, groups: int) -> Tensor:
        """Coefficients of some frequencies, (f g, b, c / g), contiguous."""

    @abstractmethod
    def join(self, Y: Tensor, groups: int) -> Tensor:
        """Coefficients from those of all frequencies, (f g, b, c)."""

    @abstractmethod
    def put(self, X: Tensor, some: slice, groups: int, Y: Tensor) -> None:
        """Write `Y` (f g, b, c / g), coefficients of some frequencies, into `X`."""

    @abstractmethod
    def mean(self, X: Tensor) -> Tensor:
        """Coefficients (b, c) of frequency zero, sums over an image; a view."""


class RealPlane(Plane):
    """Coefficients (2, f, b, c) found by products with real matrices, real parts before imaginary ones; abstract."""

    def empty(self, x: Tensor, channels: int) -> Tensor:
        return x.new_empty(2, len(self), len(x), channels)

    def take(self, X: Tensor, some: slice, groups: int) -> Tensor:
        Y: Tensor = torch.complex(X[0, some], X[1, some]).unflatten(2, (groups, -1)).transpose(1, 2)  # (f, g, b, c)
        return Y.contiguous().flatten(0, 1)

    def put(self, X: Tensor, some: slice, groups: int, Y: Tensor) -> None:
        room = X[:, some].unflatten(3, (groups, -1))  # (2, f, b, g, c)
        parts = Y.unflatten(0, (-1, groups)).transpose(1, 2)
        room[0].copy_(parts.real)
        room[1].copy_(parts.imag)

    def join(self, Y: Tensor, groups: int) -> Tensor:
        Y = Y.unflatten(0, (-1, groups)).transpose(1, 2).flatten(2)  # (f, b, g c)
        return torch.stack((Y.real, Y.imag))

    def mean(self, X: Tensor) -> Tensor:
        return X[0, 0]


class MatrixPlane(RealPlane):
    """Transform of all pixels at once by a real matrix (2 f, h w), for just the frequencies that differ."""

    def __init__(self, size: Pair, dtype: torch.dtype, device: torch.device) -> None:
        h, w = size
        alone = 0, w / 2  # columns that are their own conjugates
        kept = [(u, v) for u in range(h) for v in range(w // 2 + 1) if v not in alone or 2 * u <= h]
        weight = [1 if v in alone and u in (0, h / 2) else 2 for u, v in kept]
        u, v = torch.tensor(kept).unbind(1)
        super().__init__(size, u, v, torch.tensor(weight))
        P = self.phases(torch.arange(h), torch.arange(w))
        F = torch.stack((P.real, -P.imag))  # (2, f, h w)
        self.F = F.flatten(0, 1).to(device, dtype)
        self.F_inverse = (self.scale[:, None] * F).flatten(0, 1).to(device, dtype)

    def transform(self, x: Tensor) -> Tensor:
        return product(self.F, x.reshape(-1, x.shape[2] * x.shape[3]).mT).view(2, len(self), *x.shape[:2])

    def invert(self, X: Tensor) -> Tensor:
        return product(X.flatten(2).flatten(0, 1).mT, self.F_inverse).view(*X.shape[2:], *self.size)


class AxesPlane(RealPlane):
    """Transform by two real matrices, (2 w', w) along the columns, with w' = w // 2 + 1, and (2 h, 2 h) along the rows.

    Products read and write the order of the coefficients, so nothing is moved between them. A fast transform needs
    fewer operations, but it moves all coefficients twice, and several times more inside torch's `irfft2`.
    """

    def __init__(self, size: Pair, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, *_half_plane(size))
        h, w = size
        r, c, v = torch.arange(h), torch.arange(w), torch.arange(w // 2 + 1)
        P, R = _roots(v[:, None] * c, w), _roots(r[:, None] * r, h)
        columns = torch.stack((P.real, -P.imag))  # (2, w', w)
        rows = torch.stack((torch.stack((R.real, R.imag), 2), torch.stack((-R.imag, R.real), 2)))  # (2, u, h, 2)
        self.columns, self.rows = (F.to(device, dtype) for F in (columns.flatten(0, 1), rows.flatten(2).flatten(0, 1)))
        self.columns_inverse = (self.scale[: w // 2 + 1, None] * columns).flatten(0, 1).to(device, dtype)

    def transform(self, x: Tensor) -> Tensor:
        return self._with_adjoint(x, self._transform, self._invert, self.columns)

    def invert(self, X: Tensor) -> Tensor:
        return self._with_adjoint(X, self._invert, self._transform, self.columns_inverse)

    @staticmethod
    def _with_adjoint(x: Tensor, function: Multiply, adjoint: Multiply, columns: Tensor) -> Tensor:
        """A linear function of x and the columns, whose gradient is its adjoint: torch's own makes copies."""

        def forward(x: Tensor) -> tuple[Tensor, tuple[()]]:
            return function(x, columns), ()

        def backward(grad: Tensor, *_: object) -> Tensors:
            return (adjoint(grad, columns),)

        return with_gradient((x,), lambda x: function(x, columns), forward, backward, keep_inputs=False)

    def _transform(self, x: Tensor, columns: Tensor) -> Tensor:
        h, w = self.size
        images = x.flatten(0, 1).permute(1, 2, 0)
        room = lambda n: x.new_empty(2 * h, w // 2 + 1, n)  # noqa: E731
        X = self._by_parts(lambda part: self._coefficients(part, columns), images, room)
        return X.view(2, len(self), *x.shape[:2])

    def _invert(self, X: Tensor, columns: Tensor) -> Tensor:
        h, w = self.size
        coefficients = X.reshape(2 * h, w // 2 + 1, -1)
        room = lambda n: X.new_empty(n, h, w).permute(1, 2, 0)  # noqa: E731
        x = self._by_parts(lambda part: self._images(part, columns), coefficients, room)
        return x.permute(2, 0, 1).reshape(*X.shape[2:], h, w)

    def _by_parts(self, function: Callable[[Tensor], Tensor], x: Tensor, room: Callable[[int], Tensor]) -> Tensor:
        """The function of (..., n), of a part of the n images at a time: memory of more than a chunk is slow to get."""
        n = x.shape[2]
        parts = list(chunks(n, 2 * len(self) * x.element_size(), device=x.device)) if n and is_plain(x) else []
        if len(parts) <= 1:
            return function(x)
        y = room(n)
        for some in parts:
            y[..., some] = function(x[..., some])
        return y

    def _coefficients(self, x: Tensor, columns: Tensor) -> Tensor:
        """Coefficients (2 h, w', n) of images (h, w, n)."""
        h, _, n = x.shape
        Z = torch.bmm(columns.expand(h, -1, -1), x)  # (h, 2 w', n)
        return product(self.rows, Z.view(2 * h, -1)).view(2 * h, -1, n)

    def _images(self, X: Tensor, columns: Tensor) -> Tensor:
        """Images (h, w, n) of coefficients (2 h, w', n); not contiguous."""
        h = self.size[0]
        Z = product(self.rows.mT, X.reshape(2 * h, -1)).view(h, -1, X.shape[2])  # (h, 2 w', n)
        return torch.bmm(Z.mT, columns.expand(h, -1, -1)).mT


class FastPlane(Plane):
    """Fast Fourier transform; coefficients (b, c, f)."""

    def __init__(self, size: Pair) -> None:
        super().__init__(size, *_half_plane(size))

    def transform(self, x: Tensor) -> Tensor:
        X: Tensor = torch.fft.rfft2(_without_repeats(x))
        return X.flatten(2)

    def invert(self, X: Tensor) -> Tensor:
        h, w = self.size
        X = X.unflatten(2, (h, w // 2 + 1))
        if not (is_plain(X) and budget.has_cache(X.device)):
            return _with_contiguous_grad(torch.fft.irfft2(X, s=(h, w)))
        x: Tensor = torch.empty(*X.shape[:2], h, w, dtype=X.real.dtype, device=X.device)
        for some in chunks(len(X), 4 * X[0].numel() * X.element_size()):  # of its three copies none leaves the cache
            x[some] = torch.fft.irfft2(X[some], s=(h, w))
        return x

    def empty(self, x: Tensor, channels: int) -> Tensor:
        return torch.empty(len(x), channels, len(self), dtype=COMPLEX[x.dtype], device=x.device)

    def take(self, X: Tensor, some: slice, groups: int) -> Tensor:
        Y: Tensor = X[..., some].unflatten(1, (groups, -1)).permute(3, 1, 0, 2)  # (f, g, b, c)
        if not (is_plain(X) and budget.has_cache(X.device)):
            return Y.contiguous().flatten(0, 1)
        Z = torch.empty_like(Y, memory_format=torch.contiguous_format)
        step = max(1, budget.CACHE_LINES // X.shape[1])  # images whose rows stay in the cache until they have been read
        for k in range(0, len(X), step):
            Z[:, :, k : k + step] = Y[:, :, k : k + step]
        return Z.flatten(0, 1)

    def put(self, X: Tensor, some: slice, groups: int, Y: Tensor) -> None:
        room, parts = X.unflatten(1, (groups, -1))[..., some], Y.unflatten(0, (-1, groups)).permute(2, 1, 3, 0)
        step = 64 // X.element_size() if budget.has_cache(X.device) else max(1, room.shape[-1])  # a line of the cache
        for k in range(0, room.shape[-1], step):
            room[..., k : k + step].copy_(parts[..., k : k + step])

    def join(self, Y: Tensor, groups: int) -> Tensor:
        X: Tensor = Y.unflatten(0, (-1, groups)).permute(2, 1, 3, 0)  # (b, g, c, f)
        return X.flatten(1, 2).contiguous()

    def mean(self, X: Tensor) -> Tensor:
        return X[..., 0]


class VolumePlane(FastPlane):
    """Frequencies of volumes (d, h, w) by the fast Fourier transform, as a plane with d h rows and w columns.

    Images are volumes (b, c, d, h, w) here. Row d' h + h' of the plane has the frequencies d' and h'.
    """

    def __init__(self, volume: tuple[int, int, int]) -> None:
        d, h, w = self.volume = volume
        super().__init__((d * h, w))

    def phases(self, *offsets: Tensor) -> Tensor:
        """exp(2 pi i (t s / d + u r / h + v c / w)) in double precision for offsets s, r and c: (f, s r c)."""
        (d, h, w), (layers, rows, columns) = self.volume, offsets
        frequencies = self.u // h, self.u % h, self.v
        turns = [f[:, None] * at for f, at in zip(frequencies, (layers, rows, columns), strict=True)]
        S, R, C = (_roots(turn, n) for turn, n in zip(turns, (d, h, w), strict=True))
        return (S[:, :, None, None] * R[:, None, :, None] * C[:, None, None]).flatten(1)

    def whole(self, D: Tensor) -> Tensor:
        """Return `D` itself: all rows and columns are there."""
        return D

    def transform(self, x: Tensor) -> Tensor:
        X: Tensor = torch.fft.rfftn(_without_repeats(x), dim=(-3, -2, -1))
        return X.flatten(2)

    def invert(self, X: Tensor) -> Tensor:
        d, h, w = self.volume
        X = X.unflatten(2, (d, h, w // 2 + 1))
        return _with_contiguous_grad(torch.fft.irfftn(X, s=(d, h, w), dim=(-3, -2, -1)))


def chunks(n: int, each: int, least: int = 1, *, device: torch.device = torch.device("cpu")) -> Iterator[slice]:  # noqa: B008
    """Parts of range(n) that a device takes at once, for `each` bytes; of the `least` length, where that is more."""
    step = -(-n // max(1, -(-n // max(least, budget.chunk_bytes(device) // max(1, each)))))
    step = step if step < 8 else -(-step // 8) * 8  # a line of the cache has eight complex numbers
    return (slice(k, min(k + step, n)) for k in range(0, n, step))


def plane(size: Pair | tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Plane:
    """The plane of images, or of volumes, of that size and real dtype."""
    kind: type[Plane] = VolumePlane if len(size) == 3 else FastPlane
    if len(size) == 2 and math.prod(size) <= budget.DENSE_PIXELS:
        kind = MatrixPlane
    elif len(size) == 2 and max(size) <= budget.DENSE_SIDE and budget.has_cache(device):
        kind = AxesPlane
    return _plane(kind, size, dtype, device)


@tensor_cache
def _plane(kind: type[Any], size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Plane:
    made: Plane = kind(size, dtype, device) if kind in (MatrixPlane, AxesPlane) else kind(size)
    return made


def transform_units(size: Pair) -> float:
    """Rounding of a Fourier transform in units, relative to the norm: by FFT, or by a matrix for each axis or both."""
    fast = 8 * sum(math.pow(p, 1.5) for side in size for p in _prime_factors(side))
    axes = sum(2 * (side + 2) * math.sqrt(2 * side) for side in size)  # as in exported layers
    n = math.prod(size)
    both = (n + 2) * math.sqrt(2 * n) if n <= budget.DENSE_PIXELS else 0.0
    return max(fast, axes, both)


def _prime_factors(n: int) -> list[int]:
    p = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [] if n == 1 else [p, *_prime_factors(n // p)]


def _half_plane(size: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies u and v of h rows by w // 2 + 1 columns, and 2 for each whose conjugate is not among them, else 1."""
    h, w = size
    u, v = (axis.flatten() for axis in torch.meshgrid(torch.arange(h), torch.arange(w // 2 + 1), indexing="ij"))
    return u, v, torch.where((v == 0) | (2 * v == w), 1, 2)


def _roots(turns: Tensor, n: int) -> Tensor:
    """exp(2 pi i turns / n) for whole numbers, whose angle loses no digits."""
    angle = (turns % n).double() * (2 * math.pi / n)
    sine = torch.where((2 * turns) % n == 0, 0.0, angle.sin())  # real frequencies are real to the last digit
    return torch.complex(angle.cos(), sine)


def is_plain(x: Tensor) -> bool:
    """Whether `x` may be worked on piece by piece: no gradient is wanted, nothing is traced or transformed."""
    return is_concrete(x) and not torch.is_grad_enabled() and len(x) > 0


def _without_repeats(x: Tensor) -> Tensor:
    """Return `x`, or a copy if entries share memory: the FFT of an expanded tensor fails in older versions of torch."""
    return x.contiguous() if is_concrete(x) and 0 in x.stride() else x


def _with_contiguous_grad(x: Tensor) -> Tensor:
    """Return `x`, and make its gradient contiguous.

    The FFT of an expanded gradient, such as that of a sum, fails in older versions of torch.
    """

    def backward(grad: Tensor, *_: object) -> Tensors:
        return (grad.contiguous(),)

    return with_gradient((x,), lambda x: x, lambda x: (x.view_as(x), ()), backward, keep_inputs=False)
