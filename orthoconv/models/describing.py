"""What a network knows about itself besides its weights: the shape of its images and the names of its classes."""

__all__ = ["Description", "checked_names", "describe", "description_of"]

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch import nn

from orthoconv.nn.arguments import positive_int

Model = TypeVar("Model", bound=nn.Module)


class Description(NamedTuple):
    """What is known of a model's inputs and outputs.

    Attributes:
        input_shape: Channels, height and width of an image, or None.
        class_names: Names of the classes in the order of the logits, or None.
    """

    input_shape: tuple[int, int, int] | None
    class_names: tuple[str, ...] | None


def describe(model: Model, input_shape: Sequence[int] | None = None, class_names: Sequence[str] | None = None) -> Model:
    """Tell a model the shape of its images and the names of its classes; `orthoconv.predict` asks it for them.

    They become the attributes `input_shape` and `class_names`, and go along when the model is copied. A network from
    `models.load` or `models.pretrained` has them already.

    Arguments:
        model: Any model.
        input_shape: Channels, height and width of an image; by default what the model knows stays.
        class_names: Names of the classes in the order of the logits; by default what the model knows stays.

    Returns:
        The same model.

    >>> model = describe(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), (1, 8, 8), ["cat", "dog"])
    >>> description_of(model)
    Description(input_shape=(1, 8, 8), class_names=('cat', 'dog'))
    """
    if input_shape is not None:
        if not isinstance(input_shape, Sequence) or len(input_shape) != 3:
            raise ValueError(f"input_shape must be channels, height and width of an image, got {input_shape!r}")
        vars(model)["input_shape"] = tuple(positive_int("input_shape", n) for n in input_shape)
    if class_names is not None:
        vars(model)["class_names"] = checked_names(class_names)
    return model


def checked_names(class_names: object) -> tuple[str, ...]:
    """Return names of classes, or raise an error if they are not a list of strings.

    >>> checked_names(["cat", "dog"])
    ('cat', 'dog')
    """
    if isinstance(class_names, str) or not isinstance(class_names, Sequence):
        raise ValueError(f"class_names must be a list with a name for each class, got {class_names!r}")
    if bad := [name for name in class_names if not isinstance(name, str)]:
        raise ValueError(f"class_names must be strings, got {bad[0]!r}")
    return tuple(class_names)


def description_of(model: nn.Module) -> Description:
    """Return what `describe` told a model.

    >>> description_of(nn.ReLU())
    Description(input_shape=None, class_names=None)
    """
    return Description(vars(model).get("input_shape"), vars(model).get("class_names"))
