"""Parameters with which layers start as the identity."""

__all__ = ["half_projectors_", "identity_", "rectangular_identity"]

import torch
from torch import Tensor


@torch.no_grad()
def identity_(weight: Tensor, groups: int = 1, *, turns: bool = True) -> Tensor:
    """Fill a kernel (o, i / groups, *k) with the identity of each group, at the centre tap; or a matrix.

    Where a group has more inputs than outputs, they take turns: input j goes to output j modulo the outputs. Without
    turns, the inputs beyond the outputs go nowhere.

    >>> identity_(torch.empty(2, 3, 1, 1))[..., 0, 0]
    tensor([[1., 0., 1.],
            [0., 1., 0.]])
    """
    o, (i, *taps) = len(weight) // groups, weight.shape[1:]
    matrices = weight.zero_().view(groups, o, i, *taps)
    for k in taps:
        matrices = matrices.select(3, (k - 1) // 2)
    columns = torch.arange(i if turns else min(i, o), device=weight.device)
    matrices[:, columns % o, columns] = 1
    return weight


def rectangular_identity(o: int, i: int, like: Tensor) -> Tensor:
    """Semi-orthogonal (o, i) matrix that copies the inputs; if they are more than the outputs, in turns and scaled.

    >>> rectangular_identity(1, 4, torch.empty(0))
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    T = identity_(like.new_empty(o, i))
    norms: Tensor = torch.linalg.vector_norm(T, dim=1, keepdim=True)
    return T / norms.clamp_min(1)


@torch.no_grad()
def half_projectors_(N: Tensor, first: int) -> Tensor:
    """Fill matrices (groups, n, c, r), `first` for one axis and the rest for the other, with unit vectors.

    In turn they are the first r and the last r unit vectors, so that two successive filters of BCOP with two taps shift
    every channel by one pixel, and an even number of filters has one tap, the centre. (If c is odd, channel r is in no
    N, and ends off the centre.)

    >>> half_projectors_(torch.empty(1, 2, 2, 1), 2)[0, :, :, 0]
    tensor([[1., 0.],
            [0., 1.]])
    """
    c, r = N.shape[-2:]
    units = torch.eye(c, dtype=N.dtype, device=N.device)
    for n in range(N.shape[1]):
        late = (n if n < first else n - first) % 2
        N[:, n] = units[:, c - r :] if late else units[:, :r]
    return N
