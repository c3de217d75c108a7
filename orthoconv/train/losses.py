"""Losses of Lipschitz-margin training."""

__all__ = ["hinge_loss", "offset_cross_entropy"]

import math

from torch import Tensor
from torch.nn import functional as F


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


def offset_cross_entropy(logits: Tensor, labels: Tensor, offset: float = 0.4, temperature: float = 0.25) -> Tensor:
    r"""Return the cross-entropy with an offset and a temperature, :math:`T\,\mathrm{CE}((y - u e_t) / T)`, batch mean.

    The true class must lead by more than the offset u before the loss becomes small; a small temperature T lets images
    that do lead by more count for less (Prach and Lampert, Almost-orthogonal layers, 2022, who have u = sqrt(2) and
    T = 1/4).

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        offset: Number u that is subtracted from the logit of the true class.
        temperature: Positive number T that logits are divided by, and the loss multiplied by.

    >>> import torch
    >>> offset_cross_entropy(torch.tensor([[0.4, 0.0]]), torch.tensor([0]), offset=0.4, temperature=1.0)
    tensor(0.6931)
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, got {temperature!r}")
    if not (math.isfinite(offset) and offset >= 0):
        raise ValueError(f"offset must be at least 0 and finite, got {offset!r}")
    shifted = logits.scatter_add(1, labels[:, None], logits.new_full((len(labels), 1), -offset))
    return temperature * F.cross_entropy(shifted / temperature, labels)
