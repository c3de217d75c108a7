"""Cross-examination of certificates: each certified example attacked at nearly its own radius."""

__all__ = ["cross_examine"]

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from orthoconv.attacks.autoattack import apgd
from orthoconv.attacks.descent import L2Ball, pgd
from orthoconv.devices import move


def cross_examine(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    radius: Tensor,
    *,
    share: float = 0.999,
    iterations: int = 100,
    restarts: int = 5,
    seed: int = 0,
) -> Tensor:
    """Whether PGD, or APGD with either loss, changes the class of each example within `share` of its radius.

    If a certificate is right, none changes. With two classes APGD has one loss, as the other needs three.

    Arguments:
        model: Function of a batch to logits.
        x: Inputs (b, ...) in [0, 1], on any device, where the result will be.
        labels: Their classes (b,).
        radius: What is certified for each, (b,); those with 0 are not attacked.
        share: Part of the radius that perturbations may have.
        iterations: Steps of each attack.
        restarts: Random starts of PGD.
        seed: That of the random starts.

    Returns:
        A truth value for each example, (b,).

    >>> model, x = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)), torch.tensor([[0.9, 0.4], [0.6, 0.5]])
    >>> _ = nn.init.eye_(model[1].weight)  # the class is the larger entry
    >>> cross_examine(model, x, torch.tensor([0, 0]), torch.tensor([0.5, 0.5]) / 2**0.5, iterations=3)
    tensor([False,  True])
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share!r}")
    home, (x, labels, radius) = x.device, move(model, x, labels, radius)
    source, broken = torch.Generator().manual_seed(seed), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    attacks: list[Callable[..., Tensor]] = [
        partial(pgd, iterations=iterations, restarts=restarts, generator=source),
        partial(apgd, loss="ce", iterations=iterations, seed=seed),
        partial(apgd, loss="dlr", iterations=iterations, seed=seed),
    ]
    with torch.no_grad():
        attacks = attacks if len(x) and model(x[:1].clone()).shape[1] > 2 else attacks[:2]
    for attack in attacks:
        left = (~broken & (radius > 0)).nonzero().squeeze(1)
        if len(left):
            adversarial = attack(model, x[left], labels[left], ball=L2Ball(share * radius[left]))
            with torch.no_grad():
                broken[left] = model(adversarial).argmax(1) != labels[left]
    return broken.to(home)
