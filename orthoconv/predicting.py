"""The class and the certified radius of images, whatever they are given as."""

__all__ = ["Prediction", "Predictions", "predict"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from orthoconv.certificates import certify
from orthoconv.data.pictures import Picture, as_images
from orthoconv.devices import move
from orthoconv.margins import margin, radius_text
from orthoconv.models.describing import checked_names, description_of
from orthoconv.modules import require_module, zeros_for

_STEP = 0.05  # share by which radii grow that local certificates are tried for
_CHUNK = 256


@dataclass(frozen=True)
class Prediction:
    """What a network says of one image.

    Attributes:
        index: The class.
        name: Its name, if the network knows it.
        margin: Lead of its logit over the next one.
        radius: Distance in the l2 norm within which no image has another class; 0 if nothing is certain.

    >>> print(Prediction(3, "cat", 0.5, 0.25))
    cat (class 3), margin 0.5000, certified radius 0.2500
    """

    index: int
    name: str | None
    margin: float
    radius: float

    def __str__(self) -> str:
        label = f"class {self.index}" if self.name is None else f"{self.name} (class {self.index})"
        return f"{label}, margin {self.margin:.4f}, certified radius {radius_text(self.radius)}"


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a network says of some images; each of them, ``predictions[k]``, is a `Prediction`.

    Attributes:
        images: The images as the network saw them, (b, c, h, w).
        logits: Its outputs, (b, classes).
        index: Classes, (b,).
        margin: Lead of each class over the next one, (b,).
        radius: Certified radius of each image, (b,), rounding deducted.
        lipschitz: Lipschitz bound of the logits.
        class_names: Names of all classes, or None.

    >>> import torch
    >>> predictions = predict(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.rand(3, 1, 2, 2))
    >>> len(predictions), type(predictions[0]).__name__
    (3, 'Prediction')
    """

    images: Tensor
    logits: Tensor
    index: Tensor
    margin: Tensor
    radius: Tensor
    lipschitz: float
    class_names: tuple[str, ...] | None = None

    @property
    def names(self) -> list[str | None]:
        """The name of the class of each image, or None."""
        return [prediction.name for prediction in self]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, k: int) -> Prediction:
        index = int(self.index[k])
        name = None if self.class_names is None else self.class_names[index]
        return Prediction(index, name, float(self.margin[k]), float(self.radius[k]))

    def __iter__(self) -> Iterator[Prediction]:
        return (self[k] for k in range(len(self)))

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def __repr__(self) -> str:
        return f"Predictions({len(self)} images, Lipschitz bound {self.lipschitz:.9g})\n{self}"


def predict(
    model: nn.Module,
    images: Picture | Sequence[Picture],
    *,
    resize: bool | Sequence[int] = False,
    class_names: Sequence[str] | None = None,
    local: bool = False,
) -> Predictions:
    """Return the class of each image, and the radius within which no image has another class.

    The radii are those that `orthoconv.certify` gives for the predicted classes, with what rounding does deducted. A
    certificate is about the image that the network sees: after scaling, that is the scaled one.

    Arguments:
        model: A network, such as `models.pretrained` and `models.load` return, or any that `certify` takes.
        images: A tensor (c, h, w) or (b, c, h, w); a NumPy array (h, w), (h, w, c), (b, h, w) or (b, h, w, c); a PIL
            image; the path of an image file, or its bytes; or a list of these. Bytes from 0 to 255 or floats in [0, 1].
        resize: Whether to scale images of another size to that of the network; or a height and a width.
        class_names: Names of the classes, if the network does not know them; see `models.describe`.
        local: Whether to look for larger radii by local certificates, in steps of a twentieth; see `certify`.

    >>> import torch
    >>> from orthoconv.nn import CayleyLinear
    >>> model = nn.Sequential(nn.Flatten(), CayleyLinear(64, 2))
    >>> prediction = predict(model, torch.rand(1, 8, 8), class_names=["cat", "dog"])[0]
    >>> prediction.name in ("cat", "dog") and prediction.radius <= prediction.margin / 2**0.5
    True
    """
    require_module(model)
    known = description_of(model)
    x = as_images(images, known.input_shape, resize).to(zeros_for(model, ()).dtype)
    certificates = certify(model, _with_classes(model, x), local=_STEP if local else False)
    names = known.class_names if class_names is None else checked_names(class_names)
    if names is not None and len(names) != certificates.logits.shape[1]:
        raise ValueError(f"the network has {certificates.logits.shape[1]} classes, but {len(names)} names: {names}")
    lead = margin(certificates.logits, certificates.labels)
    return Predictions(
        x, certificates.logits, certificates.labels, lead, certificates.radius, certificates.lipschitz, names
    )


def _with_classes(model: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some images at a time and their classes; `certify` has put the model into eval mode, without gradients."""
    for part in x.split(_CHUNK):
        (there,) = move(model, part.clone())
        logits = model(there)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            what = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"predict takes a network that returns logits (b, classes), got {what}")
        yield part, logits.argmax(1).cpu()
