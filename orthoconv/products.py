"""Products of two matrices, by the faster of the two libraries that torch brings along."""

__all__ = ["dense", "is_faster", "product"]

from collections.abc import Sequence

import torch
from torch import Tensor

from orthoconv import budget
from orthoconv.autograd import Tensors, with_gradient
from orthoconv.tracing import is_eager, is_traced

_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what torch.compile calls for a linear layer on a CPU
_FEWEST = 8  # rows and columns: thin products take longer by oneDNN


def product(A: Tensor, B: Tensor) -> Tensor:
    """Return A @ B, by oneDNN where that is faster: large matrices in float32, on processors where MKL is slow.

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
    if not is_faster(A, B):
        return A @ B
    rows = B.is_contiguous()

    def forward(A: Tensor, B: Tensor) -> tuple[Tensor, Tensors]:  # keeps what the gradient needs and, as torch, no more
        return _by_onednn(A, B), (A if B.requires_grad else None, B if A.requires_grad else None)

    def backward(grad: Tensor, needed: Sequence[bool], inputs: object, kept: tuple[Tensor, ...]) -> Tensors:
        A, B = kept
        left = product(grad, B.mT) if needed[0] else None
        if not needed[1]:
            return left, None
        return left, product(A.mT, grad) if rows else product(grad.mT, A).mT  # laid out as B: optimizers are slow else

    return with_gradient((A, B), torch.matmul, forward, backward, keep_inputs=False)


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
    return A.contiguous() if is_faster(A, A.mT) and not A.mT.is_contiguous() else A


def is_faster(A: Tensor, B: Tensor) -> bool:
    """Whether `product` multiplies by oneDNN: large matrices in float32, on a CPU, in eager mode.

    Shapes that do not fit are left to torch's error.

    Arguments:
        A: Matrix (m, k).
        B: Matrix (k, n).

    >>> is_faster(torch.ones(2, 3), torch.ones(3, 2))
    False
    """
    if (
        is_traced()
        or torch._C._get_tracing_state() is not None
        or A.ndim != 2
        or B.ndim != 2
        or A.shape[1] != B.shape[0]
    ):
        return False
    (m, k), n = A.shape, B.shape[1]
    if m * k * n < budget.ONEDNN_PRODUCTS or min(m, n) < _FEWEST or k == 0:
        return False
    usual = all(C.dtype == torch.float32 and C.device.type == "cpu" and C.layout == torch.strided for C in (A, B))
    return usual and is_eager(A, B) and _onednn is not None and bool(torch.backends.mkldnn.enabled)


def _by_onednn(A: Tensor, B: Tensor) -> Tensor:
    C: Tensor = _onednn(_without_gaps(A), _without_gaps(B).mT, None, "none", [], "")  # type: ignore[misc]
    return C


def _without_gaps(A: Tensor) -> Tensor:
    return A if A.mT.is_contiguous() else A.contiguous()
