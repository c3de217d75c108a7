"""The margin of the true class, which certificates and attacks share."""

__all__ = ["check_labels", "check_logits", "integer_labels", "margin", "radius_text"]

import math
from fractions import Fraction

import torch
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
    column = labels[:, None].long()
    true = logits.gather(1, column)
    others = logits.scatter(1, column, -math.inf)
    return (true - others.amax(1, keepdim=True)).squeeze(1)


def radius_text(radius: float) -> str:
    """Return a certified radius with four digits, rounded down: what is printed must be certified, too.

    >>> radius_text(0.48689), radius_text(0.25)
    ('0.4868', '0.2500')
    """
    if not 0 < radius < math.inf:
        return f"{radius:.4f}"
    units = math.floor(Fraction(radius) * 10_000)  # exact, where a product of floats could round up
    return f"{units // 10_000}.{units % 10_000:04d}"


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise an error unless the shapes are (b, classes) and (b,), with two classes or more."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or logits.shape[1] < 2:
        raise ValueError(
            f"a margin needs logits (b, classes) and labels (b,), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )


def check_labels(labels: Tensor, classes: int) -> None:
    """Raise an error unless the labels are integers from 0 to classes - 1; on an accelerator the host waits.

    >>> check_labels(torch.tensor([0, 2]), 3)
    """
    labels = integer_labels(labels)
    least, most = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if least < 0 or most >= classes:
        raise ValueError(f"labels must be from 0 to {classes - 1}, got some from {least} to {most}")


def integer_labels(labels: Tensor) -> Tensor:
    """Return labels of any integer type as int64; raise an error if they are of another type.

    >>> integer_labels(torch.tensor([0, 2], dtype=torch.uint8))
    tensor([0, 2])
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    return labels.long()
