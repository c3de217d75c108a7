"""Averages of a model over maps of the image that do not increase distances."""

__all__ = ["IsometryAverage", "Mirror", "Move"]

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.nn.arguments import axis, check_image, module, modules
from orthoconv.nn.layer import Child, Combination, G, Guarantee, Layer, Permutation


class Mirror(Permutation):
    """Mirror image: the columns in reverse order, or the rows.

    Arguments:
        dim: Axis that is reversed: -1 for the columns, -2 for the rows.

    Shape:
        Any, to the same.

    >>> Mirror()(torch.tensor([[1.0, 2.0, 6.0]]))
    tensor([[6., 2., 1.]])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        if dim not in (-1, -2):
            raise ValueError(f"dim must be -1 or -2, got {dim!r}")
        self.dim = int(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Move(Layer):
    """Move an image by some pixels. Those that leave are lost, and zeros take the free places.

    Arguments:
        rows: Rows by which it moves down; up if negative.
        columns: Columns by which it moves to the right; to the left if negative.

    Shape:
        (..., h, w), to the same.

    >>> Move(0, 1)(torch.tensor([[1.0, 2.0, 6.0]]))
    tensor([[0., 1., 2.]])
    """

    guarantee: ClassVar[Guarantee | None] = "nonexpansive"

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = axis("rows", rows), axis("columns", columns)

    def forward(self, x: Tensor) -> Tensor:
        check_image("Move", x.shape)
        h, w = x.shape[-2:]
        rows, columns = max(-h, min(h, self.rows)), max(-w, min(w, self.columns))  # F.pad refuses to cut off more
        return F.pad(x, (columns, -columns, rows, -rows))

    def lipschitz(self, shape: Sequence[int]) -> float:
        return 1.0

    def rounding_units(self, shape: Sequence[int]) -> float:
        return 0.0

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}"


class IsometryAverage(Combination):
    """Mean of a model over an image and what maps make of it: by default (f(x) + f(mirror x)) / 2.

    A mirror image is as far from another mirror image as the images are. So the mean has the Lipschitz bound of the
    model, and certificates hold for it. The same is true of every map that does not increase distances, such as `Move`.
    The bound of a map that does is counted. The mean needs no training. With n maps, it costs n + 1 times the time of
    the model.

    Arguments:
        f: The model.
        maps: Modules from images to images of the same shape; by default `Mirror()` alone.

    Shape:
        (b, c, h, w), to the shape that the model returns.

    >>> x = torch.tensor([[[[1.0, 2.0, 6.0]]]])
    >>> IsometryAverage(nn.Identity())(x)
    tensor([[[[3.5000, 2.0000, 3.5000]]]])
    >>> IsometryAverage(nn.Identity(), [Mirror(), Move(0, 1)])(x)
    tensor([[[[2.3333, 1.6667, 3.0000]]]])
    """

    copies_input: ClassVar[bool] = True

    def __init__(self, f: nn.Module, maps: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.f = module("f", f)
        self.maps = nn.ModuleList([Mirror()] if maps is None else modules("maps", maps))

    def of(self, f: nn.Module) -> "IsometryAverage":
        """Return the mean of another model over the same maps.

        Arguments:
            f: The model.
        """
        return IsometryAverage(f, self.maps)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise ValueError(f"IsometryAverage takes images (b, c, h, w), got shape {tuple(x.shape)}")
        images = [x, *(image(x.clone()) for image in self.maps)]
        if other := [y for y in images if y.shape != x.shape]:
            raise ValueError(
                f"maps must keep the shape of images, {tuple(x.shape)}; one of them returned {tuple(other[0].shape)}"
            )
        n, outputs = len(images), self.f(torch.cat(images))  # together, so that layers compute their operators once
        total: Tensor = reduce(torch.add, ((1 / n) * outputs).unflatten(0, (n, -1)))
        return total

    def growth(self, x: Tensor, child: Child[G]) -> G:
        share = 1 / (len(self.maps) + 1)
        total = share * child("f", self.f, x.clone())
        for k, image in enumerate(self.maps):
            moved = image(x.clone())
            total = total + share * (child(f"maps.{k}", image, x.clone()) * child("f", self.f, moved))
        return total
