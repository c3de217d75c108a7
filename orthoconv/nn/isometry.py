"""Averages of a model over maps of the image that keep distances."""

__all__ = ["IsometryAverage"]

from typing import ClassVar

import torch
from torch import Tensor, nn

from orthoconv.nn.layer import Child, Combination, G


class IsometryAverage(Combination):
    """Mean of a model over an image and its mirror image, (f(x) + f(mirror x)) / 2.

    A mirror image is as far from another mirror image as the images are. So the mean has the Lipschitz bound of the
    model, and certificates hold for it. It needs no training, and costs twice the time of the model.

    Arguments:
        f: The model.

    Shape:
        (b, c, h, w), to the shape that the model returns.

    >>> x = torch.tensor([[[[1.0, 2.0, 6.0]]]])
    >>> IsometryAverage(nn.Identity())(x)
    tensor([[[[3.5000, 2.0000, 3.5000]]]])
    """

    copies_input: ClassVar[bool] = True

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        if not isinstance(f, nn.Module):
            raise ValueError(f"f must be a module, got {f!r}")
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"IsometryAverage takes images (b, c, h, w), got shape {tuple(x.shape)}")
        both = self.f(torch.cat((x, x.flip(-1))))  # together, so that layers compute their operators once
        return torch.add(*(0.5 * both).unflatten(0, (2, -1)))

    def growth(self, x: Tensor, child: Child[G]) -> G:
        mirrored = x.flip(-1)
        one = child("f", self.f, x.clone())
        other = one if torch.equal(x, mirrored) else child("f", self.f, mirrored)
        return 0.5 * one + 0.5 * other
