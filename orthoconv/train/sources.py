"""Where the batches of a run come from: images in memory, or a DataLoader of torch."""

__all__ = ["Loader", "Memory", "Source", "require_batch_size", "source_of"]

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from orthoconv import budget
from orthoconv.data.arrays import as_split
from orthoconv.data.batching import augment, epoch_order, generator
from orthoconv.data.split import Split
from orthoconv.train.distributed import World
from orthoconv.train.recipe import Recipe

Batch = tuple[Tensor, Tensor]


def require_batch_size(n: int, size: int, world: World) -> None:
    """Refuse a batch of more than the `n` training images, or that the processes cannot share."""
    if size > n or size % world.size:
        several = f" and a multiple of the {world.size} processes" if world.size > 1 else ""
        raise ValueError(
            f"batch_size must be at most {n}, the number of training images{several}, got {size}; "
            f"the command line has --recipe.batch_size for it"
        )


class Memory:
    """Images in memory, in an order that depends on the seed and the epoch alone.

    Arguments:
        data: The images, on any device. They are moved to that of `world`'s model if they are few enough.
        recipe: Its seed, batch size and augmentation.
        world: This process among those of a distributed run.
        device: Device that computes.
    """

    def __init__(self, data: Split, recipe: Recipe, world: World, device: torch.device) -> None:
        n, size = len(data.labels), recipe.batch_size
        require_batch_size(n, size, world)
        fits = data.images.numel() * data.images.element_size() <= budget.DATA_BYTES
        self._data = Split(data.images.to(device), data.labels.to(device)) if fits else data
        self._recipe, self._world, self.steps = recipe, world, n // size

    @property
    def shape(self) -> torch.Size:
        """Shape of an image."""
        return self._data.images.shape[1:]

    def epoch(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield the share of this process of the batches of an epoch, from the one with the number `first` on."""
        recipe, world, size = self._recipe, self._world, self._recipe.batch_size
        order = epoch_order(len(self._data.labels), recipe.seed, epoch)
        for k in range(first, self.steps):
            indices = order[k * size : (k + 1) * size].to(self._data.images.device)
            x, labels = _augmented(self._data.images[indices], recipe, epoch, k), self._data.labels[indices]
            yield x[world.rank :: world.size], labels[world.rank :: world.size]


class Loader:
    """Batches of a DataLoader, whose random numbers depend on the seed and the epoch alone.

    The state of torch's generator is put aside while the loader is asked for a batch. Its order, and what its data set
    draws from torch, are then those of the epoch, also in a run that is resumed; batches that were used are skipped.

    Arguments:
        loader: What yields pairs of images and labels; bytes are divided by 255.
        recipe: Its seed and augmentation. The size of the batches is that of the loader.
        world: This process, which must be the only one.
    """

    def __init__(self, loader: DataLoader[Any], recipe: Recipe, world: World) -> None:
        if world.size > 1:
            raise ValueError(f"a DataLoader is for one process, got {world.size}; pass the images themselves")
        try:
            self.steps = len(loader)
        except TypeError as error:
            raise ValueError(f"the DataLoader must have a length, which its data set lacks: {error}") from error
        if not self.steps:
            raise ValueError("the DataLoader has no batches")
        self._loader, self._recipe = loader, recipe

    @property
    def shape(self) -> torch.Size:
        """Shape of an image, which the first batch is read for."""
        return next(self.epoch(0, 0))[0].shape[1:]

    def epoch(self, epoch: int, first: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, from the one with the number `first` on."""
        state = generator(self._recipe.seed, epoch).get_state()
        batches: Iterator[Any] | None = None
        for k in range(self.steps):
            outside = torch.get_rng_state()
            torch.set_rng_state(state)
            try:
                batches = iter(self._loader) if batches is None else batches
                batch = next(batches, None)
                state = torch.get_rng_state()
            finally:
                torch.set_rng_state(outside)
            if batch is None:
                raise ValueError(f"the DataLoader ended after {k} batches of an epoch, and says it has {self.steps}")
            if k >= first:
                x, labels = _pair(batch)
                yield _augmented(x, self._recipe, epoch, k), labels


Source = Memory | Loader


def source_of(data: Any, recipe: Recipe, world: World, device: torch.device) -> Source:
    """Return the source of what `fit` takes: a `Split`, a pair of arrays, or a DataLoader."""
    if isinstance(data, DataLoader):
        return Loader(data, recipe, world)
    if isinstance(data, tuple) and len(data) == 2:
        ready = isinstance(data, Split) and isinstance(data.images, Tensor) and data.images.is_floating_point()
        return Memory(data if ready else as_split(*data), recipe, world, device)  # type: ignore[arg-type]
    raise TypeError(f"data must be a Split, a pair of images and labels, or a DataLoader, got {type(data).__name__}")


def _pair(batch: Any) -> Batch:
    """Return the images and the labels of a batch of a DataLoader."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(v, Tensor) for v in batch)):
        raise ValueError(f"the DataLoader must yield pairs of tensors, images and labels, got {type(batch).__name__}")
    x, labels = batch
    if x.ndim != 4 or labels.shape != x.shape[:1] or labels.is_floating_point():
        raise ValueError(
            "the DataLoader must yield images (b, c, h, w) and integers (b,), "
            f"got {tuple(x.shape)} and {tuple(labels.shape)} of {labels.dtype}"
        )
    return x if x.is_floating_point() else x.float().div_(255), labels.long()


def _augmented(x: Tensor, recipe: Recipe, epoch: int, step: int) -> Tensor:
    return augment(x, generator(recipe.seed, epoch, step), recipe.shift, recipe.flip) if recipe.augment else x
