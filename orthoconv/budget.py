"""What differs between devices, and sizes that were tuned by measuring on a CPU (docs/performance.md).

Work on a CPU is cut into pieces that stay in its cache. An accelerator launches a kernel for each piece, so it gets the
whole at once, as far as its memory goes. Nobody has tuned the figures of accelerators yet (docs/devices.md).

Tests patch the sizes to force a way on small inputs.
"""

__all__ = [
    "ACCELERATOR_BYTES",
    "CACHE_LINES",
    "CHUNK_BYTES",
    "DATA_BYTES",
    "DENSE_PIXELS",
    "DENSE_SIDE",
    "EXACT_NORM",
    "FACTORS_BYTES",
    "FACTORS_KEPT",
    "FACTORS_ORDER",
    "FEWEST_FREQUENCIES",
    "INVERTED_ORDER",
    "INVERTED_ROWS",
    "LIFTED_NORM",
    "LIFTED_RATIO",
    "MOST_TAPS",
    "ONEDNN_PRODUCTS",
    "READ_EVERY",
    "REMEMBERED_BYTES",
    "SHIFTED_CHANNELS",
    "SIZES_KEPT",
    "TILED_BYTES",
    "TILED_IMAGES",
    "TILED_UNITS",
    "TILES",
    "UNPIVOTED_NORM",
    "chunk_bytes",
    "has_cache",
    "has_double",
]

import math
import os
from pathlib import Path

import torch


def _mkl_is_slow() -> bool:
    """Whether torch multiplies by MKL, on a processor of AMD's with AVX512, which MKL uses only on Intel's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    try:
        with Path("/proc/cpuinfo").open() as file:
            about = file.read(200)  # of Linux; the vendor is in the second line
    except OSError:
        about = os.environ.get("PROCESSOR_IDENTIFIER", "")  # of Windows
    return "AuthenticAMD" in about


CHUNK_BYTES = 2**25  # Work through frequencies in chunks of this many bytes, so that each chunk stays in the cache.
ACCELERATOR_BYTES = 2**31  # The same on an accelerator, so that a chunk stays small beside its memory.
DATA_BYTES = 2**33  # Keep training images of up to so many bytes on the accelerator; move larger sets batch by batch.
READ_EVERY = 20  # Read the figures of a training run from an accelerator every so many steps.
CACHE_LINES = 2048  # Move coefficients of so many (image, channel) rows at a time, one cache line each.
DENSE_PIXELS = 64  # Transform images of up to so many pixels by one matrix product,
DENSE_SIDE = 32 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 16  # on a CPU those of up to so many rows
# and columns by a product for each axis, and larger ones by the FFT.
FEWEST_FREQUENCIES = 16  # Take at least so many frequencies at once: sums over fewer are slow.
INVERTED_ROWS = 1.0  # Invert matrices of order n for n images and more; for fewer, factor and solve.
INVERTED_ORDER = 32, 128  # Invert those of up to this order for any number of images: on a CPU, on an accelerator.
FACTORS_KEPT = 4.0  # Keep factors for the backward pass if they have up to so many times the bytes of the images,
FACTORS_BYTES = 2**26  # or up to so many for one layer,
FACTORS_ORDER = 256  # or a larger order. Compute others again in the backward pass.
# WideResNet10-10 takes a tenth longer so, and has 2.8 instead of 3.7 times the memory of plain (docs/performance.md).
MOST_TAPS = 49  # Sum (I + A) / 2 over the taps of kernels with up to so many.
ONEDNN_PRODUCTS = 2**22 if _mkl_is_slow() else math.inf  # Multiply matrices by oneDNN from so many multiplications on.
LIFTED_RATIO = 1.2  # Use the spatial path while in * kh * kw <= 1.2 * out; beyond that the FFT is faster.
EXACT_NORM = 64.0  # Find the Cayley transform of larger weights in float64: in float32 it is not orthogonal to 1e-5.
UNPIVOTED_NORM = 3.0  # Eliminate without pivots in (I + A) / 2 while the Frobenius norm of A is up to 3 sqrt(n).
LIFTED_NORM = 32.0  # Use it for kernels of up to this norm: its rounding error grows with the kernel.
SHIFTED_CHANNELS = 48  # Shift channels between two products from so many on; with fewer, convolve by the kernel.
_WITHOUT_DOUBLE = {"mps"}
SIZES_KEPT = 4  # Remember the operators of a layer for so many image sizes,
REMEMBERED_BYTES = 2**30  # and for fewer if they have more bytes than this; only the newest may have more by itself.
TILED_BYTES = 300 * 10**6  # Remember matrices of tiles instead, for operators with more bytes than this.
TILES = 128, 64  # Sides of tiles, the preferred one first; multiples of 4.
TILED_UNITS = 256.0  # Cut kernels if that costs up to so many units of rounding; rounding alone makes 50 of them.
TILED_IMAGES = 4  # Take tiles for up to so many images; for more, the transform costs less.


def has_cache(device: torch.device) -> bool:
    """Whether work goes faster in pieces that stay in a cache: on a CPU.

    >>> has_cache(torch.device("cpu")), has_cache(torch.device("cuda"))
    (True, False)
    """
    return device.type == "cpu"


def chunk_bytes(device: torch.device) -> int:
    """Bytes of one piece of work."""
    return CHUNK_BYTES if has_cache(device) else ACCELERATOR_BYTES


def has_double(device: torch.device) -> bool:
    """Whether a device computes in float64; what needs it is computed on the CPU otherwise."""
    return device.type not in _WITHOUT_DOUBLE
