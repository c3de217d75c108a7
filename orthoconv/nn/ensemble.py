"""The mean of several models."""

__all__ = ["Ensemble"]

from collections.abc import Iterable
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.nn.arguments import modules
from orthoconv.nn.layer import Child, Combination, G


class Ensemble(Combination):
    """Mean of several models of one input, (f_1(x) + ... + f_n(x)) / n.

    The margin of the mean is at least the mean of the margins, since the largest of the means is at most the mean of
    the largest. Its Lipschitz bound is the mean of the bounds, for all logits and for each pair of classes. So the mean
    of networks from different seeds has radii that are at least the mean of theirs, if their bounds are equal.

    Arguments:
        members: The models, one or more.

    Shape:
        Any that all members take, to the one shape that they return.

    >>> Ensemble([nn.ReLU(), nn.Identity()])(torch.tensor([-2.0, 3.0]))
    tensor([-1.,  3.])
    """

    copies_input: ClassVar[bool] = True

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules("members", members, "model"))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [member(x.clone()) for member in self.members]  # whose first layer may work in place
        if other := [y for y in outputs if y.shape != outputs[0].shape]:
            raise ValueError(
                f"Ensemble needs members that return one shape, got {tuple(outputs[0].shape)} and "
                f"{tuple(other[0].shape)}"
            )
        total: Tensor = reduce(torch.add, outputs)
        return total / len(outputs)

    def growth(self, x: Tensor, child: Child[G]) -> G:
        parts = [child(f"members.{k}", member, x.clone()) for k, member in enumerate(self.members)]
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return (1 / len(parts)) * total
