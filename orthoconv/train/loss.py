"""The loss of Lipschitz-margin training."""

__all__ = ["hinge_loss"]

from torch import Tensor


def hinge_loss(logits: Tensor, labels: Tensor, margin: float) -> Tensor:
    r"""Return the multi-class hinge loss, :math:`\frac1c \sum_{i \ne t} \max(0, m - y_t + y_i)`, mean of the batch.

    If the true class leads by m = sqrt(2) L eps, the image is certified for eps (Section 5.1). The released code has
    m = L eps.

    >>> import torch
    >>> hinge_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), margin=0.5)
    tensor(0.)
    """
    true = logits.gather(1, labels[:, None])
    excess = (margin - true + logits).clamp_min(0)
    return excess.scatter(1, labels[:, None], 0).mean()
