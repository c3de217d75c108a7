"""Losses that ask the true class for a lead, the same over every other class."""

__all__ = ["hinge_loss", "logit_annealing", "offset_cross_entropy", "tau_cross_entropy"]

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.train.losses.arguments import at_least_zero, checked_labels, positive


def hinge_loss(logits: Tensor, labels: Tensor, margin: float) -> Tensor:
    r"""Return the multi-class hinge loss, :math:`\frac1c \sum_{i \ne t} \max(0, m - y_t + y_i)`, mean of the batch.

    If the true class leads by m = sqrt(2) L eps, the image is certified for eps (Section 5.1). The released code has
    m = L eps.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        margin: Lead m that the loss asks for, at least 0.

    >>> hinge_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), margin=0.5)
    tensor(0.)
    """
    at_least_zero("margin", margin)
    labels = checked_labels(logits, labels)
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

    >>> offset_cross_entropy(torch.tensor([[0.4, 0.0]]), torch.tensor([0]), offset=0.4, temperature=1.0)
    tensor(0.6931)
    """
    labels = checked_labels(logits, labels)
    return temperature * F.cross_entropy(_shifted(logits, labels, offset, temperature), labels)


def tau_cross_entropy(logits: Tensor, labels: Tensor, tau: float = 4.0) -> Tensor:
    r"""Return the cross-entropy of scaled logits, :math:`\mathrm{CE}(\tau y) / \tau`, batch mean.

    A 1-Lipschitz network cannot scale its logits by itself. A large tau approaches the hinge of the lead over the best
    other class, a small one the cross-entropy of a network without confidence (Bethune et al., Pay attention to your
    loss, 2022). Their code has tau = 0.5, 5 and 10 for two moons, and 256 for CIFAR-100 with random labels. It is
    `offset_cross_entropy` without an offset, at the temperature 1 / tau; by default both have 1 / 4. For one score y of
    two classes, pass the columns 0 and y.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        tau: Positive factor of the logits.

    >>> tau_cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([0]), tau=2.0)
    tensor(0.3466)
    """
    return offset_cross_entropy(logits, labels, 0.0, 1 / positive("tau", tau))


def logit_annealing(
    logits: Tensor, labels: Tensor, offset: float = 2.0, temperature: float = 0.75, beta: float = 5.0
) -> Tensor:
    r"""Return the logit annealing loss, :math:`-T (1 - p)^\beta \log p`, batch mean.

    Here p is the softmax of :math:`(y - \xi e_t) / T` at the true class. The gradient of an image vanishes as its
    lead grows, so that no image is pushed to a lead that a Lipschitz network has no room for (Lai et al.,
    BRONet, 2025). The default constants are the paper's, for logits that are scaled to about four times those of
    a 1-Lipschitz network. With beta = 0 it is `offset_cross_entropy`.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        offset: Number :math:`\xi` that is subtracted from the logit of the true class.
        temperature: Positive number T that logits are divided by, and the loss multiplied by.
        beta: Exponent, at least 0.

    >>> logit_annealing(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=1.0, beta=1.0)
    tensor(0.3466)
    """
    at_least_zero("beta", beta)
    labels = checked_labels(logits, labels)
    log_p = F.log_softmax(_shifted(logits, labels, offset, temperature), 1).gather(1, labels[:, None])
    rest = -torch.expm1(log_p).clamp_max(-torch.finfo(log_p.dtype).tiny)  # 1 - p, with a finite gradient at p = 1
    return temperature * (-log_p * rest.pow(beta)).mean()


def _shifted(logits: Tensor, labels: Tensor, offset: float, temperature: float) -> Tensor:
    """Subtract the offset from the logit of the true class, and divide by the temperature."""
    positive("temperature", temperature)
    at_least_zero("offset", offset)
    shift = torch.full_like(logits[:, :1], -offset)
    return logits.scatter_add(1, labels[:, None], shift) / temperature
