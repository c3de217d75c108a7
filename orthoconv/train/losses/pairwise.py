"""Losses that know how fast each class can catch up with the true one.

They take the Lipschitz constants of the differences of logits: entry (i, j) of `constants` is that of y_i - y_j. For a
model that ends in a linear layer with the rows w_i, it is L |w_i - w_j|, where L belongs to the layers before
(`orthoconv.certificates.pairwise_constants`). Without such a tensor it is sqrt(2) L for every pair.
"""

__all__ = ["certificate_regularizer", "emma_loss", "gloro_loss", "radius_cross_entropy", "regularized_cross_entropy",
           "vra_loss"]  # fmt: skip

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from orthoconv.train.losses.arguments import at_least_zero, checked_constants, checked_labels, positive, share

_NEAREST = 1e-3  # of the largest constant: smaller ones count as so much, so that a radius stays finite
_LEAST = 0.01  # share of eps that EMMA adds where the true class does not lead


def emma_loss(
    logits: Tensor, labels: Tensor, eps: float, constants: Tensor | None = None, lipschitz: float = 1.0
) -> Tensor:
    r"""Return the cross-entropy after each other class has caught up as far as it can: EMMA, batch mean.

    .. math:: \mathrm{CE}(y_j + \epsilon_j c_{tj}), \quad
        \epsilon_j = \epsilon \, \mathrm{clip}\left(\frac{y_t - y_j}{\epsilon c_{tj}}, 0.01, 1\right)

    The radii :math:`\epsilon_j` are constants for the gradient, the rates c are not. A class that is within reach gets
    just what makes it equal to the true one, so that every rival counts, not the nearest alone (Hu et al., Unlocking
    deterministic robustness certification on ImageNet, 2023). They let eps grow to 3 * 36 / 255 in the first half
    of the run.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        eps: Positive radius.
        constants: Lipschitz constants c of the differences of logits, (classes, classes), or None.
        lipschitz: Lipschitz constant L of the logits, if `constants` is None.

    >>> emma_loss(torch.tensor([[0.5, 0.0]]), torch.tensor([0]), eps=1.0)  # the other class may draw level
    tensor(0.6931)
    """
    positive("eps", eps)
    labels = checked_labels(logits, labels)
    c = _rates(logits, labels, constants, lipschitz)
    lead = (logits.gather(1, labels[:, None]) - logits).detach()
    radii = (lead / _nonzero(c.detach())).clamp(_LEAST * eps, eps)
    return F.cross_entropy(logits + radii * c, labels)


def certificate_regularizer(
    logits: Tensor, labels: Tensor, constants: Tensor | None = None, lipschitz: float = 1.0
) -> Tensor:
    r"""Return the mean certified radius, :math:`\max(0, \min_j (y_t - y_j) / c_{tj})`; 0 where the class is wrong.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        constants: Lipschitz constants c of the differences of logits, (classes, classes), or None.
        lipschitz: Lipschitz constant L of the logits, if `constants` is None.

    >>> certificate_regularizer(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), lipschitz=0.5**0.5)
    tensor(1.)
    """
    labels = checked_labels(logits, labels)
    return _radii(logits, labels, constants, lipschitz).amin(1).clamp_min(0).mean()


def regularized_cross_entropy(
    logits: Tensor, labels: Tensor, gamma: float = 0.1, constants: Tensor | None = None, lipschitz: float = 1.0
) -> Tensor:
    """Return the cross-entropy minus gamma times the mean certified radius: certificate regularization, CR.

    From Singla, Singla and Feizi, Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100, 2022. Their code
    takes gamma from the command line, and 0 if none is given. The value of the paper is not quoted here.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        gamma: Weight of the radius, at least 0.
        constants: Lipschitz constants of the differences of logits, (classes, classes), or None.
        lipschitz: Lipschitz constant of the logits, if `constants` is None.

    >>> regularized_cross_entropy(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    tensor(0.6931)
    """
    at_least_zero("gamma", gamma)
    labels = checked_labels(logits, labels)
    return F.cross_entropy(logits, labels) - gamma * certificate_regularizer(logits, labels, constants, lipschitz)


def radius_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    eps: float = 2 * 36 / 255,
    temperature: float = 0.18,
    constants: Tensor | None = None,
    lipschitz: float = 1.0,
) -> Tensor:
    r"""Return the cross-entropy of the certified radii, batch mean.

    .. math:: T \log\Big(1 + \sum_{j \ne t} e^{(\epsilon - r_j) / T}\Big), \quad r_j = (y_t - y_j) / c_{tj}

    It asks each radius for eps, where `offset_cross_entropy` asks each lead for an offset. Rows of a head that are near
    each other make leads small and radii large, and only radii are certified. The two losses agree if all constants
    are equal.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        eps: Positive radius.
        temperature: Positive number T that radii are divided by, and the loss multiplied by.
        constants: Lipschitz constants c of the differences of logits, (classes, classes), or None.
        lipschitz: Lipschitz constant L of the logits, if `constants` is None.

    >>> radius_cross_entropy(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), eps=2**0.5, temperature=1.0)
    tensor(0.6931)
    """
    positive("eps", eps), positive("temperature", temperature)
    labels = checked_labels(logits, labels)
    c = _rates(logits, labels, constants, lipschitz)
    c = c if constants is None else torch.maximum(c, _NEAREST * constants.detach().amax().to(c))
    radii = (logits.gather(1, labels[:, None]) - logits) / _nonzero(c)
    lacking = ((eps - radii) / temperature).scatter(1, labels[:, None], 0.0)
    return temperature * torch.logsumexp(lacking, 1).mean()


def vra_loss(
    logits: Tensor,
    labels: Tensor,
    eps: float = 36 / 255,
    gamma: float = 0.1,
    constants: Tensor | None = None,
    lipschitz: float = 1.0,
) -> Tensor:
    r"""Return a loss of the cosine and of what radii lack of eps, for verified robust accuracy, batch mean.

    .. math:: -(1 - \gamma) \frac{y_t}{|y|} + \gamma \sum_{j \ne t} s_j \, \mathrm{softmax}(s)_j, \quad
        s_j = \max(0, \epsilon - (y_t - y_j) / c_{tj})

    It is the loss of the library orthogonium (Boissin et al., 2025), which has gamma = 0.1. The cosine does not depend
    on the scale of the logits; the second part does, up to the radius that is asked for.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        eps: Positive radius.
        gamma: Weight of the second part, from 0 to 1.
        constants: Lipschitz constants c of the differences of logits, (classes, classes), or None.
        lipschitz: Lipschitz constant L of the logits, if `constants` is None.

    >>> vra_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([0]), gamma=0.5)
    tensor(-0.5000)
    """
    positive("eps", eps), share("gamma", gamma)
    labels = checked_labels(logits, labels)
    cosine = F.normalize(logits, dim=1).gather(1, labels[:, None])
    lacking = (eps - _radii(logits, labels, constants, lipschitz)).clamp_min(0)  # 0 at the true class
    weights = lacking.scatter(1, labels[:, None], -math.inf).softmax(1)
    return (gamma * (lacking * weights).sum(1, keepdim=True) - (1 - gamma) * cosine).mean()


def gloro_loss(
    logits: Tensor, labels: Tensor, eps: float, constants: Tensor | None = None, lipschitz: float = 1.0
) -> Tensor:
    r"""Return the cross-entropy with one more class for images that are not certified: GloRo, batch mean.

    Its logit is :math:`\max_{j \ne k} (y_j + \epsilon c_{kj})`, where k is the class that leads. It is below y_k just
    where the radius exceeds eps (Leino, Wang and Fredrikson, Globally-robust neural networks, 2021). They certify at
    eps = 0.3 and 1.58 on MNIST, and at 36 / 255 on CIFAR-10. For 1.58 their code has a variant of the loss, after
    TRADES, and lets eps grow from 1 % to 110 % of it in the first half of the run.

    Arguments:
        logits: Shape (b, classes).
        labels: True classes, (b,).
        eps: Positive radius.
        constants: Lipschitz constants c of the differences of logits, (classes, classes), or None.
        lipschitz: Lipschitz constant L of the logits, if `constants` is None.

    >>> gloro_loss(torch.tensor([[1.0, -100.0]]), torch.tensor([0]), eps=101 / 2**0.5)
    tensor(0.6931)
    """
    positive("eps", eps)
    labels = checked_labels(logits, labels)
    leading = logits.detach().argmax(1)
    raised = logits + eps * _rates(logits, leading, constants, lipschitz)
    uncertified = raised.scatter(1, leading[:, None], -math.inf).amax(1, keepdim=True)
    return F.cross_entropy(torch.cat((logits, uncertified), 1), labels)


def _radii(logits: Tensor, labels: Tensor, constants: Tensor | None, lipschitz: float) -> Tensor:
    """Distance at which each class can catch up, (b, classes); infinite for the true class itself."""
    lead = logits.gather(1, labels[:, None]) - logits
    rates = _rates(logits, labels, constants, lipschitz)
    return (lead / _nonzero(rates)).scatter(1, labels[:, None], math.inf)


def _rates(logits: Tensor, labels: Tensor, constants: Tensor | None, lipschitz: float) -> Tensor:
    """Rates at which each class can catch up with that of `labels`, (b, classes); 0 for the class itself."""
    if constants is None:
        c = logits.new_full(logits.shape, math.sqrt(2) * positive("lipschitz", lipschitz))
        return c.scatter(1, labels[:, None], 0.0)
    return checked_constants(constants, logits.shape[1]).to(logits)[labels].scatter(1, labels[:, None], 0.0)


def _nonzero(rates: Tensor) -> Tensor:
    """Replace rates of 0 by the smallest number: two classes with equal rows never catch up."""
    return rates.clamp_min(torch.finfo(rates.dtype).tiny)
