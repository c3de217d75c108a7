"""Convolutions that are made orthogonal in the Fourier domain, whatever makes each matrix orthogonal."""

__all__ = ["SpectralConv2d", "UnscaledConv2d", "Way", "matrices_on"]

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from orthoconv import fourier
from orthoconv.convolutions import convolve
from orthoconv.linalg import weight_norm
from orthoconv.nn.arguments import Pair
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.nn.layer import Guarantee
from orthoconv.nn.plain import PlainSpectrum
from orthoconv.nn.weight_norm import Signs, WeightNormed
from orthoconv.planes import Plane, plane
from orthoconv.tracing import is_eager

Way = Literal["constant", "matrices", "fused", "lifted", "tiled"]


class UnscaledConv2d(BaseConv2d):
    """Kernel -> spectrum -> `orthogonalize` -> apply (Algorithm 1); abstract.

    A method is a subclass that says how one matrix is made orthogonal, on (..., o, i). Attributes: `weight`, a kernel,
    and `bias`. `SpectralConv2d` adds a scale to the kernel.

    Arguments are those of `BaseConv2d`.

    >>> class Polar(UnscaledConv2d):
    ...     identity = False
    ...
    ...     @staticmethod
    ...     def orthogonalize(W):
    ...         U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    ...         return U @ Vh
    >>> bool((Polar(2, 3, 3).singular_values((4, 4)) - 1).abs().max() < 1e-5)
    True
    """

    guarantee: ClassVar[Guarantee | None] = "orthogonal"
    _forced: ClassVar[Way | None] = None

    @staticmethod
    @abstractmethod
    def orthogonalize(W: Tensor) -> Tensor:
        """Semi-orthogonal matrices of the same shape (..., o, i), for any W."""

    def transform(self, kernel: Tensor, size: Pair) -> Tensor:
        """Orthogonal matrices (f, g, o, i) from the kernel, on the plane of images of that size."""
        return self.orthogonalize(self.spectral_weight(kernel, size))

    def spectral_weight(self, kernel: Tensor, size: Pair) -> Tensor:
        """Matrices (f, g, o, i) of the kernel, on the plane of images of that size."""
        return matrices_on(self.plane_of(size, kernel), kernel, self.dilation, self.groups)

    def plane_of(self, size: Pair, like: Tensor) -> Plane:
        """The Fourier plane of images of that size."""
        return plane(size, like.dtype, like.device)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return self.matrices(sources[0], size)

    def matrices(self, kernel: Tensor, size: Pair) -> Tensor:
        """Orthogonal matrices (f, g, o, i) from the kernel, real ones with f = 1 where they are all the same."""
        if self.geometry.is_constant(size):
            return self.orthogonalize(kernel.flatten(2).sum(2).view(1, self.groups, -1, kernel.shape[1]))
        return self.transform(kernel, size)

    def way(self, size: Pair, *, adjoint: bool = False, eager: bool = True, images: int = 1) -> Way:
        """Choose how to convolve so many images of that inner size. Tests choose by `forced`.

        "constant": one real matrix for every pixel. "matrices": one matrix for each frequency, formed, and remembered
        in eval mode. "fused" and "lifted" of `CayleyConv2d` go from kernel to output without forming them, and "tiled"
        remembers those of a smaller torus.
        """
        if self.geometry.is_constant(size):
            return "constant"
        ways: list[Way] = self.possible_ways(size, adjoint=adjoint, images=images) if eager else ["matrices"]
        return self._forced if self._forced is not None and self._forced in ways else ways[0]

    def possible_ways(self, size: Pair, *, adjoint: bool, images: int) -> list[Way]:
        """List the ways that are possible in eager mode, the best one first."""
        return ["matrices"]

    @classmethod
    @contextmanager
    def forced(cls, way: Way) -> Iterator[None]:
        """Let the layers of this class convolve in that way inside the context, where it is possible."""
        cls._forced, before = way, cls._forced
        try:
            yield
        finally:
            cls._forced = before

    def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        size, tensors = self.geometry.size_of(x.shape), (x, *self.sources(), *(() if bias is None else (bias,)))
        eager = is_eager(*tensors)
        way = "constant" if len(x) == 0 else self.way(size, adjoint=adjoint, eager=eager, images=len(x))
        return self.convolve_by(way, x, bias, adjoint=adjoint)

    def convolve_by(self, way: Way, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
        """`convolve` in the way that was chosen."""
        size = self.geometry.size_of(x.shape)
        D = self.formed(self.cached_operator(size))
        D = D.mH if adjoint else D
        if way == "constant":
            return self.geometry.apply_pixels(x, D[0].real.flatten(0, 1), bias)
        return convolve(self.plane_of(size, x), x, D, bias)

    def one_tap(self, size: Pair) -> Tensor:
        return self.formed(self.cached_operator(size))[0].flatten(0, 1)

    def formed(self, operator: Tensor) -> Tensor:
        """Matrices (f, g, o, i) of the operator, for a method that keeps factors of them."""
        return operator

    def spectrum(self, size: Pair, *, double: bool = False) -> Tensor:
        size = self.geometry.inner_size(size)
        Q = self.cached_operator(size)
        if not self.geometry.is_constant(size):
            Q = self.plane_of(size, self.weight).whole(Q)
        if double:
            Q = Q.to(torch.complex128 if Q.is_complex() else torch.float64)
        return self.formed(Q).transpose(0, 1).clone()  # what is remembered stays as it is, whatever is done to this

    def inner_units(self, size: Pair) -> float:
        return self.spectral_units(size, float(torch.linalg.matrix_norm(self.cached_operator(size)).max()))

    def exported_inner(self, size: Pair) -> nn.Module:
        D = self.spectrum(size)
        return PlainSpectrum(D.mH if self.transposed else D, self.geometry.inner_size(size))


def matrices_on(p: Plane, kernel: Tensor, dilation: Pair = (1, 1), groups: int = 1) -> Tensor:
    """Matrices (f, g, o, i) of a kernel (g o, i, kh, kw) on a plane.

    >>> from orthoconv.planes import plane
    >>> matrices_on(plane((4, 4), torch.float32, torch.device("cpu")), torch.ones(2, 3, 1, 1)).shape
    torch.Size([10, 1, 2, 3])
    """
    _, i, *k = kernel.shape
    taps = kernel.movedim((0, 1), (-2, -1)).reshape(math.prod(k), groups, -1, i)
    offsets = (fourier.offsets(n, d) for n, d in zip(k, dilation, strict=True))
    return p.matrices(taps, *offsets)


class SpectralConv2d(WeightNormed, UnscaledConv2d):
    """`UnscaledConv2d` whose kernel is g V / |V| (Section 4.1); abstract.

    Attributes: `weight` (V), `g`, `bias`, and `signs`, a buffer or None.

    Arguments are those of `BaseConv2d`, and `signs` as in `CayleyConv2d`.

    >>> class Nearest(SpectralConv2d):
    ...     @staticmethod
    ...     def orthogonalize(W):
    ...         U, _, Vh = torch.linalg.svd(W, full_matrices=False)
    ...         return U @ Vh
    >>> bool((Nearest(2, 3, 3).singular_values((4, 4)) - 1).abs().max() < 1e-5)
    True
    """

    def set_up(self, *, signs: Signs = None) -> None:
        super().set_up()
        self.add_scale(signs, self.groups * self.kernel_shape[1])

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        V, g, *signs = sources
        Q = self.matrices(weight_norm(V, g), size)
        return Q * signs[0].view(self.groups, 1, -1) if signs else Q
