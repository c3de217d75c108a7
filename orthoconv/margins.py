"""The margin of the true class, which certificates and attacks share."""

__all__ = ["check_logits", "margin"]

import math

from torch import Tensor


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Lead of the true class over the best other one; it is negative where the class is wrong.

    Arguments:
        logits: Shape (b, classes), of two classes or more.
        labels: True classes, (b,).

    >>> import torch
    >>> margin(torch.tensor([[3.0, 1.0], [0.0, 0.5]]), torch.tensor([0, 0]))
    tensor([ 2.0000, -0.5000])
    """
    check_logits(logits, labels)
    true = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf)
    return (true - others.amax(1, keepdim=True)).squeeze(1)


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise an error unless the shapes are (b, classes) and (b,), with two classes or more."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.shape[1] < 2:
        raise ValueError(
            f"a margin needs logits (b, classes) and labels (b,), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
