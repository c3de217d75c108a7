"""APGD of AutoAttack (Croce and Hein, 2020), by the package pyautoattack."""

__all__ = ["apgd"]

from typing import Literal

import torch
from torch import Tensor, nn

from orthoconv.attacks.descent import L2Ball
from orthoconv.devices import move


def apgd(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    ball: L2Ball,
    *,
    loss: Literal["ce", "dlr"] = "ce",
    iterations: int = 100,
    restarts: int = 1,
    seed: int = 0,
) -> Tensor:
    """Adversarial inputs by APGD with the cross-entropy or the difference of logits ratio; inputs are in [0, 1].

    Arguments:
        model: Function of a batch to logits.
        x: Inputs (b, ...) in [0, 1], on any device, where the result will be.
        labels: True classes (b,).
        ball: Where perturbations may be.
        loss: "ce", the cross-entropy, or "dlr", the difference of logits ratio.
        iterations: Steps of each attack.
        restarts: Number of random starts.
        seed: That of the random starts.

    Returns:
        For each example the input that APGD ends with; those that it does not break are returned as they were.

    >>> model, x = nn.Linear(3, 3, bias=False), torch.tensor([[0.5, 0.4, 0.1]])
    >>> _ = nn.init.eye_(model.weight)  # the class is the largest entry
    >>> model(apgd(model, x, torch.tensor([0]), L2Ball(0.2), iterations=5)).argmax(1)
    tensor([1])
    """
    try:
        from pyautoattack.autopgd_base import APGDAttack
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'APGD needs pyautoattack: pip install "orthoconv[attacks]"', name=error.name
        ) from error
    if (ball.low, ball.high) != (0.0, 1.0):
        raise ValueError(f"APGD takes inputs in [0, 1], got a ball in [{ball.low}, {ball.high}]")
    if not torch.is_grad_enabled():
        raise RuntimeError("APGD needs gradients; call it outside torch.no_grad")

    home, (x, labels) = x.device, move(model, x, labels)

    def of_floats(z: Tensor) -> Tensor:  # which is what it calls the model with
        y: Tensor = model(z.to(x.dtype, copy=True))  # a layer may work in place
        return y

    adversarial = x.clone()
    for k in range(restarts):
        with torch.no_grad():
            left = model(adversarial.clone()).argmax(1) == labels
        if bool(left.any()):
            attack = APGDAttack(
                of_floats,
                n_iter=iterations,
                norm="L2",
                eps=ball.reach(x)[left].float(),
                seed=seed + k,
                loss=loss,
                device=x.device,
            )
            adversarial[left] = attack.perturb(x[left], labels[left]).detach().to(x.dtype)
    return (x + ball.project(x, adversarial - x)).to(home)  # its arithmetic may leave the ball by a rounding error
