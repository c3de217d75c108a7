"""Products of two matrices, by the faster of the two libraries that torch brings along."""

__all__ = ["dense", "product"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.tracing import is_eager

_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile calls for a linear layer on a CPU


def product(A: Tensor, B: Tensor) -> Tensor:
    """Return A @ B, by oneDNN where that is faster: for large matrices in float32, on processors that MKL slows down.

    torch multiplies matrices by MKL. On AMD's processors, MKL leaves half of each AVX512 register unused, and oneDNN,
    which torch uses for convolutions, takes less than half of the time. The sum of n products is rounded n times in
    either library, as `rounding_units` counts it, but MKL's error is mostly smaller: it sums in blocks.

    Arguments:
        A: Matrix (m, k), or whatever `@` takes.
        B: Matrix (k, n), or whatever `@` takes.

    >>> product(torch.ones(2, 3), torch.ones(3, 2))
    tensor([[3., 3.],
            [3., 3.]])
    """
    if not _is_faster(A, B):
        return A @ B
    return with_gradient((A, B), torch.matmul, lambda A, B: (_by_onednn(A, B), ()), _gradients)


def dense(A: Tensor) -> Tensor:
    """Return A, or a copy without gaps between its rows and columns, if oneDNN is to multiply it.

    oneDNN takes a thousand times as long where neither rows nor columns are contiguous, as in ``A[:, 2:]``. `product`
    calls this by itself. Call it first for a matrix that several products take.

    Arguments:
        A: Matrix (m, n).

    >>> A = torch.zeros(4, 6)
    >>> dense(A.mT).data_ptr() == A.data_ptr()
    True
    """
    used = A.dtype == torch.float32 and A.device.type == "cpu" and math.isfinite(budget.ONEDNN_PRODUCTS)
    return A.contiguous() if used and not A.mT.is_contiguous() else A


def _gradients(grad: Tensor, needed: Sequence[bool], inputs: tuple[Tensor, ...], kept: object) -> Tensors:
    A, B = inputs
    return product(grad, B.mT) if needed[0] else None, product(A.mT, grad) if needed[1] else None


def _is_faster(A: Tensor, B: Tensor) -> bool:
    """Whether oneDNN multiplies these two, and takes less time; shapes that do not fit are left to torch's error."""
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0] or A.dtype != B.dtype or A.dtype != torch.float32:
        return False
    large = math.prod(A.shape) * B.shape[1] >= budget.ONEDNN_PRODUCTS
    on_cpu = large and A.device.type == B.device.type == "cpu" and is_eager(A, B)
    return on_cpu and _onednn is not None and bool(torch.backends.mkldnn.enabled)


def _by_onednn(A: Tensor, B: Tensor) -> Tensor:
    C: Tensor = _onednn(dense(A), dense(B).mT, None, "none", [], "")  # type: ignore[misc]
    return C
