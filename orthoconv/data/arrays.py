"""Images and labels from arrays of others: NumPy's or torch's, bytes or floats, channels first or last."""

__all__ = ["as_split", "channels_first", "distinct_names", "in_unit_interval", "numbered", "tensor_of"]

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from orthoconv.data.split import DataError, Split

_CHANNELS = (1, 3)


def as_split(images: Any, labels: Any, classes: Sequence[str] | None = None) -> Split:
    """Return images and their labels as a `Split`, ready for `orthoconv.train.fit` and `orthoconv.certify`.

    Arguments:
        images: Array or tensor of shape (n, h, w), (n, c, h, w) or (n, h, w, c). Integers are from 0 to 255, floats
            from 0 to 1.
        labels: Number of the class of each image, of shape (n,) or (n, 1); or its name, a string.
        classes: Name of each class. By default the names among the labels in alphabetical order, or none.

    >>> import numpy
    >>> split = as_split(numpy.full((2, 8, 8, 3), 255, dtype=numpy.uint8), ["cat", "dog"])
    >>> split.images.shape, split.images.max().item(), split.labels.tolist(), split.classes
    (torch.Size([2, 3, 8, 8]), 1.0, [0, 1], ('cat', 'dog'))
    """
    pixels = in_unit_interval(channels_first(tensor_of("images", images)))
    numbers, names = _numbers(labels, None if classes is None else distinct_names(classes))
    if len(pixels) != len(numbers):
        raise DataError(f"there are {len(pixels)} images, but {len(numbers)} labels")
    return Split(pixels, numbers, names)


def in_unit_interval(images: Tensor) -> Tensor:
    """Return images as floats from 0 to 1: integers from 0 to 255 are divided by 255.

    >>> in_unit_interval(torch.tensor([[[[51]]]], dtype=torch.uint8))
    tensor([[[[0.2000]]]])
    """
    if not images.numel() or images.dtype == torch.bool:
        return images.float()
    least, most = (float(v) for v in images.aminmax())
    if images.is_floating_point():
        if not (least >= 0 and most <= 1):  # NaN as well
            hint = "; divide them by 255" if least >= 0 and 1 < most <= 255 else ""
            raise DataError(f"images of floats must be from 0 to 1, got values from {least:g} to {most:g}{hint}")
        return images.float()
    if least < 0 or most > 255:
        raise DataError(f"images of integers must be from 0 to 255, got values from {least:g} to {most:g}")
    return images.float().div_(255)


def channels_first(images: Tensor) -> Tensor:
    """Return images as (n, c, h, w), from that, from (n, h, w, c), or from (n, h, w).

    >>> channels_first(torch.zeros(5, 8, 9, 3)).shape, channels_first(torch.zeros(5, 8, 9)).shape
    (torch.Size([5, 3, 8, 9]), torch.Size([5, 1, 8, 9]))
    """
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        raise DataError(
            f"images must have the shape (n, h, w), (n, c, h, w) or (n, h, w, c), got {tuple(images.shape)}"
        )
    first, last = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
    if first == last:  # both or neither: channels are the shorter axis
        first, last = images.shape[1] < min(images.shape[2:]), images.shape[3] < min(images.shape[1:3])
    if first == last:
        raise DataError(f"images of shape {tuple(images.shape)} may have channels first or last; pass (n, c, h, w)")
    return images if first else images.permute(0, 3, 1, 2)


def numbered(labels: Iterable[Any], classes: Sequence[str]) -> Tensor:
    """Return the number of each label among the names of the classes.

    >>> numbered(["dog", "cat"], ["cat", "dog"])
    tensor([1, 0])
    """
    numbers = {name: k for k, name in enumerate(classes)}
    labels = [str(label) for label in labels]
    if unknown := sorted(set(labels) - set(numbers)):
        raise DataError(f"the class {unknown[0]!r} is not among those of the training images: {_short(classes)}")
    return torch.tensor([numbers[label] for label in labels], dtype=torch.int64)


def distinct_names(names: Any) -> list[str]:
    """Return the names of classes, each a text of its own; refuse a single text, and a name that is given twice.

    >>> distinct_names(("cat", "dog"))
    ['cat', 'dog']
    """
    listed = names.tolist() if hasattr(names, "tolist") else names
    if isinstance(listed, str) or not isinstance(listed, Sequence) or any(isinstance(v, list) for v in listed):
        raise DataError(f"classes must be a list of names, got {listed!r}")
    texts = [str(name) for name in listed]
    if repeated := [name for name in texts if texts.count(name) > 1]:
        raise DataError(
            f"each class needs a name of its own, but {repeated[0]!r} is given {texts.count(repeated[0])} times"
        )
    return texts


def _short(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} others" if len(names) > 10 else "")


def tensor_of(what: str, values: Any) -> Tensor:
    """Return numbers of an array, a list or a tensor as a tensor; `what` is what errors call them."""
    if isinstance(values, Tensor):
        return values
    try:
        array = numpy.asarray(values)
        if array.dtype.kind not in "biuf":
            raise DataError(f"{what} must be numbers, got {array.dtype}")
        if array.dtype.kind == "u" and array.dtype.itemsize > 1:
            array = array.astype(numpy.int64)  # torch computes little with the others
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} must be numbers, in an array or a tensor, got {type(values).__name__}: {error}"
        ) from error


def _numbers(labels: Any, classes: Sequence[str] | None) -> tuple[Tensor, Sequence[str] | None]:
    """Return labels as int64 (n,), and the names of the classes."""
    kind = getattr(getattr(labels, "dtype", None), "kind", "")
    listed = labels.tolist() if kind in ("U", "S", "O") else labels
    if isinstance(listed, Sequence) and len(listed) and all(isinstance(v, str) for v in listed):
        names = sorted(set(listed)) if classes is None else list(classes)
        return numbered(listed, names), names
    numbers = tensor_of("labels", listed)
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.ndim != 1 or numbers.is_floating_point() or numbers.is_complex():
        raise DataError(f"labels must be integers of shape (n,), got {tuple(numbers.shape)} of {numbers.dtype}")
    numbers = numbers.long()
    if len(numbers) and (int(numbers.min()) < 0 or (classes is not None and int(numbers.max()) >= len(classes))):
        most = "" if classes is None else f" to {len(classes) - 1}, the number of the last class"
        raise DataError(f"labels must be from 0{most}, got {int(numbers.min())} to {int(numbers.max())}")
    return numbers, classes
