"""Lipschitz constants of the differences of logits, as losses use them: with a gradient, at every step of a run."""

__all__ = ["PairwiseConstants", "pairwise_constants"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orthoconv.certificates.heads import split_head
from orthoconv.modules import in_eval_mode, leaf_inputs, zeros_for
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.nn.linear import BaseLinear

_ITERATIONS = 10


def pairwise_constants(model: nn.Module, lipschitz: float = 1.0) -> Tensor | None:
    """Lipschitz constants of the differences of logits, (classes, classes); the gradient reaches the last matrix.

    Entry (i, j) is L |w_i - w_j|, with the rows w of the last matrix. It is computed in the precision of the model, and
    rests on what `lipschitz` says. For certificates there is `certify`.

    Arguments:
        model: Model that ends in a linear layer; only `Scale`, `Shift`, `nn.Dropout` and `nn.Identity` may follow.
        lipschitz: Bound L of the model, the matrix of its last layer counted with the norm 1.

    Returns:
        The constants, or None if the model does not end in a linear layer.

    >>> from orthoconv.nn import CayleyLinear, Scale
    >>> pairwise_constants(nn.Sequential(CayleyLinear(8, 2), Scale(0.5)), lipschitz=0.5).detach().round(decimals=3)
    tensor([[0.0000, 0.7070],
            [0.7070, 0.0000]])
    """
    head = split_head(model)
    if head is None:
        return None
    W = head.matrix
    distances: Tensor = torch.cdist(W, W, compute_mode="donot_use_mm_for_euclid_dist")
    return lipschitz * distances


class PairwiseConstants:
    """`pairwise_constants` of a model in training, times the norms of the layers that promise none.

    Layers such as those of LiResNet have any norm, and a loss has to hold it down. So each layer before the head that
    promises nothing counts with its norm by 10 steps of the power method, which the gradient reaches. That is an
    estimate from below, of layers in a row: good enough for a loss, and not for a certificate.

    Arguments:
        model: Model that ends in a linear layer; otherwise there are no constants.
        input_shape: Shape of one input, without the batch.
        lipschitz: Bound of the model, with all these layers counted with the norm 1.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    >>> PairwiseConstants(model, (1, 2, 2))().shape
    torch.Size([2, 2])
    """

    def __init__(self, model: nn.Module, input_shape: Sequence[int], lipschitz: float = 1.0) -> None:
        self.model, self.lipschitz, head = model, lipschitz, split_head(model)
        self._free: list[tuple[nn.Module, torch.Size]] = []
        if head is not None and any(map(_is_free, head.body.modules())):
            with in_eval_mode(model):
                leaves = leaf_inputs(head.body, zeros_for(model, input_shape))
            self._free = [(leaf.module, leaf.x.shape[1:]) for leaf in leaves if _is_free(leaf.module)]

    def __call__(self) -> Tensor | None:
        """Compute the constants with the weights as they are, (classes, classes)."""
        constants = pairwise_constants(self.model, self.lipschitz)
        if constants is None:
            return None
        return constants * math.prod(_norm(layer, shape) for layer, shape in self._free)


def _is_free(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or (isinstance(layer, BaseConv2d | BaseLinear) and layer.promise is None)


def _norm(layer: nn.Module, shape: torch.Size) -> Tensor:
    """Norm of a layer by the power method at each frequency, with the gradient of u* D v at the largest."""
    if isinstance(layer, BaseConv2d):
        D = layer.spectrum((shape[-2], shape[-1])).flatten(0, 1)  # (g f, o, i)
    else:
        D = (layer.weight if isinstance(layer, nn.Linear) else layer.cached_operator())[None]  # type: ignore[operator]
    with torch.no_grad():
        source = torch.Generator().manual_seed(0)  # a resumed run takes the same steps
        v = torch.randn(*D.shape[::2], 1, generator=source).to(D)
        for _ in range(_ITERATIONS):
            v = nn.functional.normalize(D.mH @ (D @ v), dim=1)
        u = D @ v
        norms = torch.linalg.vector_norm(u, dim=(1, 2))
        best = norms.argmax()
        u, v = u[best] / norms[best].clamp_min(torch.finfo(norms.dtype).tiny), v[best]
    product: Tensor = u.mH @ (D[best] @ v)
    return product.real.squeeze()
