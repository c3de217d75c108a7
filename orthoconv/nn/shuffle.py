"""Permutations of channels, which let grouped layers mix."""

__all__ = ["ChannelShuffle"]

from torch import Tensor

from orthoconv.nn.arguments import positive_int
from orthoconv.nn.layer import Permutation


class ChannelShuffle(Permutation):
    """Take a channel of each group in turn: channel n of group g becomes channel g of group n (ShuffleNet, 2018).

    Arguments:
        groups: Number of groups; it divides the number of channels.

    Shape:
        (b, c, ...), to the same.

    >>> import torch
    >>> ChannelShuffle(2)(torch.tensor([[0, 1, 2, 10, 11, 12]]))
    tensor([[ 0, 10,  1, 11,  2, 12]])
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = positive_int("groups", groups)

    def forward(self, x: Tensor) -> Tensor:
        return self._exchange(x, self.groups, -1)

    def inverse(self, y: Tensor) -> Tensor:
        """The channels in the order that they had."""
        return self._exchange(y, -1, self.groups)

    def _exchange(self, x: Tensor, rows: int, columns: int) -> Tensor:
        if x.ndim < 2 or x.shape[1] % self.groups:
            raise ValueError(
                f"ChannelShuffle takes (b, c, ...) with c that {self.groups} divides, got shape {tuple(x.shape)}"
            )
        grouped: Tensor = x.unflatten(1, (rows, columns))
        return grouped.transpose(1, 2).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"{self.groups}"
