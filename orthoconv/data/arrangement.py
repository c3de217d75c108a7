"""Images of one's own: names of classes, a split by a seed, and an order whose beginnings are balanced."""

__all__ = ["Arrangement", "Labelled", "arranged", "balanced_order", "divided"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orthoconv.data.arrays import distinct_names, in_unit_interval, numbered
from orthoconv.data.batching import generator
from orthoconv.data.resizing import Size
from orthoconv.data.split import DataError, Split

_SHARE = 0.2  # of the images that are test images, if nothing else is said
_ORDER, _DIVISION = 1, 2  # two sources of random numbers of one seed


@dataclass(frozen=True)
class Arrangement:
    """How images of one's own become a training and a test split.

    Attributes:
        resize: Size to give all images: one number, or height and width.
        split: Share of the images that are test images, if they are not divided already; 0.2 by default. All are, if 1.
        seed: Seed of that division, and of the order of the images.
        classes: Names of the classes that there must be, in their order; by default those of the training images.
    """

    resize: Size | None = None
    split: float | None = None
    seed: int = 0
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.split is not None and not (isinstance(self.split, int | float) and 0 < self.split <= 1):
            raise DataError(f"split must be a share of the images, above 0 and at most 1, got {self.split!r}")


class Labelled(NamedTuple):
    """Images (n, c, h, w), bytes or floats, and the label of each: a name, or a number."""

    images: Tensor
    labels: Sequence[Any]


def arranged(
    train: Labelled, test: Labelled | None, how: Arrangement, source: object, names: Sequence[str] | None = None
) -> tuple[Split, Split]:
    """Return the training and the test split.

    Arguments:
        train: Training images; or all images, to divide.
        test: Test images, if they are apart.
        how: The arrangement.
        source: Where the images are from, for errors.
        names: Names of the classes, if they are known otherwise. Numbers among the labels then stand for them.
    """
    try:
        if names is not None:
            train = Labelled(train.images, _named(train.labels, names))
            test = None if test is None else Labelled(test.images, _named(test.labels, names))
        classes = distinct_names(how.classes or names or list(map(str, sorted(set(train.labels)))))
        _require_one_shape(train, test)
        parts = [_numbered(part, classes) for part in (train, test) if part is not None]
        if test is None:
            parts = divided(parts[0], _SHARE if how.split is None else how.split, how.seed)
        elif how.split is not None:
            raise DataError("it has training and test images apart, so that split must be left out")
        first, second = (_ordered(part, how.seed) for part in parts)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    return first, second


def divided(split: Split, share: float, seed: int) -> list[Split]:
    """Divide images at random into training and test images, each class by the same share.

    A class with two images or more has at least one of either kind, unless the share is 1.

    >>> labels = torch.tensor([0] * 10 + [1] * 5)
    >>> [part.labels.bincount().tolist() for part in divided(Split(torch.zeros(15, 1, 2, 2), labels), 0.2, 0)]
    [[8, 4], [2, 1]]
    """
    chosen = torch.ones(len(split.labels), dtype=torch.bool)
    for k in split.labels.unique().tolist() if share < 1 else ():
        own = (split.labels == k).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=generator(seed, _DIVISION, k))]
        kept = len(own) - min(max(round(share * len(own)), 1), max(len(own) - 1, 0))
        chosen[own[:kept]] = False
    if not bool(chosen.any()):
        raise DataError(f"{len(split.labels)} images are too few to take test images from: no class has two")
    return [Split(split.images[which], split.labels[which], split.classes) for which in (~chosen, chosen)]


def balanced_order(labels: Tensor, seed: int) -> Tensor:
    """Return a random order of images, each beginning of which has all classes about as often as the whole.

    >>> labels = torch.tensor([0] * 100 + [1] * 100 + [2] * 200)
    >>> labels[balanced_order(labels, 0)][:40].bincount().tolist()
    [10, 10, 20]
    """
    place = torch.zeros(len(labels), dtype=torch.float64)
    for k in labels.unique().tolist():
        own, source = (labels == k).nonzero()[:, 0], generator(seed, _ORDER, k)
        ranks = torch.randperm(len(own), generator=source).double()
        place[own] = (ranks + torch.rand(1, generator=source, dtype=torch.float64)) / len(own)
    return place.argsort()


def _ordered(split: Split, seed: int) -> Split:
    order = balanced_order(split.labels, seed)
    return Split(split.images[order], split.labels[order], split.classes)


def _numbered(part: Labelled, classes: Sequence[str]) -> Split:
    if len(part.images) != len(part.labels):
        raise DataError(f"there are {len(part.images)} images, but {len(part.labels)} labels")
    if not len(part.images):
        raise DataError("there are no images")
    return Split(in_unit_interval(part.images), numbered(part.labels, classes), classes)


def _require_one_shape(train: Labelled, test: Labelled | None) -> None:
    """Refuse test images of another shape than the training images."""
    if test is not None and len(test.images) and train.images.shape[1:] != test.images.shape[1:]:
        a, b = (tuple(part.images.shape[1:]) for part in (train, test))
        hint = "" if a[0] != b[0] else "; --resize 32, or another size, makes them alike"
        raise DataError(f"training images have the shape {a} (channels, height, width), but test images {b}{hint}")


def _named(labels: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return the name of each class that is given by its number."""
    if bad := [v for v in labels if isinstance(v, int) and not 0 <= v < len(names)]:
        raise DataError(f"the label {bad[0]} is not the number of one of {len(names)} classes")
    return [names[v] if isinstance(v, int) else str(v) for v in labels]
