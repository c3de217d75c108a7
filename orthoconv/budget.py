"""Sizes that were tuned by measuring (docs/performance.md): what a CPU does at once, and when it changes its way.

Tests patch them to force a way on small inputs.
"""

__all__ = [
    "CACHE_LINES",
    "CHUNK_BYTES",
    "DENSE_PIXELS",
    "FEWEST_FREQUENCIES",
    "INVERTED_ORDER",
    "LIFTED_NORM",
    "LIFTED_RATIO",
    "MOST_TAPS",
    "SIZES_KEPT",
]

CHUNK_BYTES = 2**25  # Work through frequencies in chunks of this many bytes, so that each chunk stays in the cache.
CACHE_LINES = 2048  # Move coefficients of so many (image, channel) rows at a time, one cache line each.
DENSE_PIXELS = 64  # Transform images of up to so many pixels by a matrix product; larger ones by the FFT.
FEWEST_FREQUENCIES = 16  # Take at least so many frequencies at once: sums over fewer are slow.
INVERTED_ORDER = 128  # Invert matrices of up to this order; for larger ones and few images, solve.
MOST_TAPS = 49  # Sum (I + A) / 2 over the taps of kernels with up to so many.
LIFTED_RATIO = 1.2  # Use the spatial path while in * kh * kw <= 1.2 * out; beyond that the FFT is faster.
LIFTED_NORM = 32.0  # Use it for kernels of up to this norm: its rounding error grows with the kernel.
SIZES_KEPT = 4  # Remember the operators of a layer for so many image sizes.
