"""Losses of optimal transport: the Kantorovich-Rubinstein dual of 1-Lipschitz scores, with a hinge or without."""

__all__ = ["hkr_loss", "kr_loss", "soft_hkr_loss"]

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.train.losses.arguments import checked_classes, checked_labels, floating, positive, share, tensor


def kr_loss(scores: Tensor, labels: Tensor) -> Tensor:
    r"""Return the negative Kantorovich-Rubinstein estimate, :math:`E[f(x) | t = 0] - E[f(x) | t = 1]`.

    Its minimum over 1-Lipschitz f is minus the Wasserstein distance of the two classes (Serrurier et al., Achieving
    robustness in classification using optimal transport with hinge regularization, 2021). Of logits of several classes
    it is the mean over the classes, each against the rest. A class that the batch lacks counts as 0.

    Arguments:
        scores: Shape (b,) or (b, 1) for two classes, or (b, classes).
        labels: Classes, (b,). With one score, positive numbers are one class, 0 and negative ones the other.

    >>> kr_loss(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1, 0, 0]))
    tensor(-2.5000)
    """
    return _kr(*_one_against_the_rest(scores, labels))


def hkr_loss(scores: Tensor, labels: Tensor, alpha: float = 0.9, margin: float = 1.0) -> Tensor:
    r"""Return the hinge-regularized loss, :math:`(1 - \alpha) \mathrm{KR} + \alpha E[\max(0, m/2 - s f(x))]`.

    Here s is 1 for the class of a score and -1 for the others. Of c logits the hinge of the true one counts c - 1
    times, as do the others together. So it is in the library deel-torchlip (Serrurier et al., 2021). Its examples have
    alpha = 0.98 and m = 1 for two digits of MNIST, and for Fashion-MNIST 0.99 and 0.25, or 0.999 and 0.1 for accuracy.
    There an alpha above 1 is the weight of the hinge beside a weight 1: it means alpha / (1 + alpha) here.

    Arguments:
        scores: Shape (b,) or (b, 1) for two classes, or (b, classes).
        labels: Classes, (b,), as for `kr_loss`.
        alpha: Weight of the hinge, from 0 to 1.
        margin: Distance m that the hinge asks for between the two sides.

    >>> hkr_loss(torch.tensor([0.5, -0.5]), torch.tensor([1, 0]), alpha=0.5)
    tensor(-0.5000)
    """
    share("alpha", alpha), positive("margin", margin)
    columns, true = _one_against_the_rest(scores, labels)
    hinge = (margin / 2 - torch.where(true, columns, -columns)).clamp_min(0)
    weights = torch.where(true, max(1, columns.shape[1] - 1), 1)
    return (1 - alpha) * _kr(columns, true) + alpha * (weights * hinge).mean()


def soft_hkr_loss(
    logits: Tensor, labels: Tensor, alpha: float = 0.9, margin: float = 1.0, temperature: float = 1.0
) -> Tensor:
    r"""Return the loss of `hkr_loss` with the true class against a soft maximum of the others, batch mean.

    .. math:: (1 - \alpha) (\sum_j \pi_j y_j - y_t)
        + \alpha (\max(0, m/2 - y_t) + \sum_j \pi_j \max(0, m/2 + y_j))

    The weights :math:`\pi` are a softmax over the other classes, of the logits times
    :math:`\tau m / \max(m, \mathrm{mean} |y|)` (Serrurier et al., On the explainable properties of 1-Lipschitz neural
    networks, 2023). deel-torchlip has a running mean of \|y\| there; it is the mean of the batch here, so that the loss
    has no state. Its defaults are those here; its example for Fashion-MNIST has alpha = 0.995, m = 0.1 and
    :math:`\tau = 50`.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        alpha: Weight of the hinge, from 0 to 1.
        margin: Distance m that the hinge asks for between the two sides.
        temperature: Factor :math:`\tau`; the larger, the more the largest of the other logits counts.

    >>> soft_hkr_loss(torch.tensor([[0.5, -0.5, -0.5]]), torch.tensor([0]), alpha=0.5)
    tensor(-0.5000)
    """
    share("alpha", alpha), positive("margin", margin), positive("temperature", temperature)
    labels = checked_labels(logits, labels)
    sharpness = temperature * margin / logits.detach().abs().mean().clamp_min(margin)
    true = F.one_hot(labels, logits.shape[1]).bool()
    others = (sharpness * logits).masked_fill(true, -torch.inf).softmax(1)
    weights = torch.where(true, 1.0, others)  # 1 for the true class, 1 for the others together
    signed = torch.where(true, logits, -logits)
    each = alpha * (margin / 2 - signed).clamp_min(0) - (1 - alpha) * signed
    return (weights * each).sum(1).mean()


def _one_against_the_rest(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (b, n), and whether each belongs to the class of its column."""
    floating("scores", scores), tensor("labels", labels)
    columns = scores[:, None] if scores.ndim == 1 else scores
    if columns.ndim != 2 or not columns.numel() or labels.shape != scores.shape[:1]:
        raise ValueError(
            "the loss needs scores (b,), (b, 1) or (b, classes) and labels (b,), "
            f"got {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
    if columns.shape[1] == 1:
        return columns, (labels > 0)[:, None]
    return columns, F.one_hot(checked_classes(labels, columns.shape[1]), columns.shape[1]).bool()


def _kr(columns: Tensor, true: Tensor) -> Tensor:
    """Return the negative estimate of scores (b, n), `true` where they belong to the class of their column."""
    return -(_mean(columns, true) - _mean(columns, ~true)).mean()


def _mean(scores: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen entries of each column; 0 where there are none."""
    return scores.where(chosen, 0).sum(0) / chosen.sum(0).clamp_min(1)
