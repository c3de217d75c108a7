"""What the page asks for: the certificate of an image, and an attack on it, as JSON."""

__all__ = ["MOST_PIXELS", "Service"]

import base64
import io
import math
import threading
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from orthoconv.attacks import L2Ball, pgd
from orthoconv.certificates import lipschitz_bound
from orthoconv.data.decoding import read_picture
from orthoconv.data.pictures import as_images
from orthoconv.devices import move
from orthoconv.margins import margin
from orthoconv.models.describing import description_of
from orthoconv.predicting import Predictions, predict

MOST_PIXELS = 25_000_000
LARGEST_EPS = 1000.0
_ITERATIONS, _STARTS = 40, 2


class Service:
    """Answers about one network; one question at a time, whatever thread asks.

    An image is scaled to the size of the network and rounded to bytes, so that the picture on the page is exactly what
    is certified.

    Arguments:
        model: The network, which knows the shape of its images; see `models.describe`.
        name: What the page calls it.
        local: Whether to look for larger radii by local certificates.
    """

    def __init__(self, model: nn.Module, name: str, *, local: bool = False) -> None:
        shape, names = description_of(model)
        if shape is None or shape[0] not in (1, 3):
            raise ValueError(f"the page needs a network of grey or coloured images of a known size, got {shape}")
        self.model, self.name, self.shape, self._lock = (
            model.eval().requires_grad_(False),
            name,
            shape,
            threading.Lock(),
        )
        self._bound, self._local = lipschitz_bound(model, shape), local
        self._predict = lru_cache(maxsize=64)(self._certificate)
        self.class_names = names
        if local:  # so that a network that has none is refused before the page is open
            self._predict(bytes(math.prod(shape)))

    def about(self) -> dict[str, Any]:
        """Describe the network."""
        channels, h, w = self.shape
        return {"name": self.name, "channels": channels, "height": h, "width": w, "lipschitz": self._bound}

    def certify(self, data: bytes) -> dict[str, Any]:
        """Return class, margin and certified radius of an image file."""
        pixels = self._pixels(data)
        with self._lock:
            predictions = self._predict(pixels)
        return {
            **self._facts(predictions.logits, predictions.index),
            "radius": _finite(predictions[0].radius),
            "logits": [
                {"name": self._name(k), "value": _finite(v)} for k, v in enumerate(predictions.logits[0].tolist())
            ],
            "image": _picture(predictions.images[0]),
        }

    def attack(self, data: bytes, eps: float) -> dict[str, Any]:
        """Return what PGD on the margin, from a few starts, makes of an image file within the distance `eps`."""
        if not 0 <= eps <= LARGEST_EPS:
            raise ValueError(f"eps must be from 0 to {LARGEST_EPS:g}, got {eps!r}")
        pixels = self._pixels(data)
        with self._lock:
            predictions = self._predict(pixels)
            x, index = predictions.images, predictions.index
            attacked = pgd(
                self.model, x, index, L2Ball(eps), iterations=_ITERATIONS, restarts=_STARTS,
                generator=torch.Generator().manual_seed(0),
            )  # fmt: skip
            with torch.no_grad():
                logits = self.model(*move(self.model, attacked)).cpu()
        moved = attacked - x
        factor = 0.5 / max(moved.abs().max().item(), 1e-12)
        lead = margin(logits, index).item()
        return {
            "eps": eps,
            "radius": _finite(predictions[0].radius),
            "norm": moved.double().norm().item(),
            "lead": _finite(lead),
            "changed": lead < 0,
            "attacked": {**self._facts(logits, logits.argmax(1)), "image": _picture(attacked[0])},
            "perturbation": {"factor": factor, "image": _picture(0.5 + factor * moved[0])},
        }

    def _pixels(self, data: bytes) -> bytes:
        """Return an image file as the bytes of an image that the network takes."""
        picture = read_picture(data, self.shape[0], MOST_PIXELS)
        x = as_images(picture, self.shape, resize=True)
        return bytes((255 * x).round().to(torch.uint8).flatten().tolist())

    def _certificate(self, pixels: bytes) -> Predictions:
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(self.shape)
        return predict(self.model, image, local=self._local)

    def _facts(self, logits: Tensor, index: Tensor) -> dict[str, Any]:
        """Return the class of one example, its name, and its lead over the others."""
        k = int(index)
        return {"index": k, "name": self._name(k), "margin": _finite(margin(logits, index).item())}

    def _name(self, index: int) -> str:
        return f"class {index}" if self.class_names is None else self.class_names[index]


def _finite(value: float) -> float:
    """Return a number that JSON has; 0 stands for one that nobody knows."""
    return 0.0 if math.isnan(value) else min(max(value, -1e300), 1e300)


def _picture(x: Tensor) -> str:
    """Return an image (c, h, w) in [0, 1] as a PNG that a page can show."""
    pixels = (255 * x.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2).numpy() if pixels.shape[2] == 1 else pixels.numpy()).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
