"""The network of the package, served from an ONNX file with its certificates, by onnxruntime and NumPy alone.

python examples/serve_onnx.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

EPS = 36 / 255


def write_file(path: Path, name: str) -> None:
    """Do what is done once, with this library: write the logits in float32 and in float64, and the bounds."""
    import torch

    from orthoconv import models, to_onnx

    model = models.pretrained(name)
    to_onnx(model, torch.rand(4, *model.input_shape), path, certificate=True)


class Server:
    """Classes and certified radii of images, by an ONNX file. Nothing here knows of orthoconv or torch."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.facts = {k: json.loads(v) for k, v in self.session.get_modelmeta().custom_metadata_map.items()}

    def __call__(self, images: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Return the classes of images (b, c, h, w) in [0, 1], float32, and radii in which no image has another one."""
        (logits,) = self.session.run(["logits64"], {"images": images})
        classes, radii = certified_radii(logits, images, self.facts)
        return [self.facts["classes"][k] for k in classes], radii


def certified_radii(logits: np.ndarray, images: np.ndarray, facts: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return classes and radii from float64 logits (b, classes): the whole certificate.

    The logits are those of the exact function but for an error of at most `error`. The difference of logits t and j
    changes by at most rates[t, j] times the distance of two images.
    """
    n, known = len(logits), np.isfinite(logits).all(1)
    logits = np.where(known[:, None], logits, 0)
    norms = np.linalg.norm(images.reshape(n, -1).astype(np.float64), axis=1)
    error = 1.001 * (facts["slack"]["relative"] * norms + facts["slack"]["absolute"])
    usual = np.full((logits.shape[1],) * 2, np.sqrt(2) * facts["lipschitz_bound"])
    rates = usual if facts["rates"] is None else np.array(facts["rates"])
    classes = logits.argmax(1)
    room = logits[np.arange(n), classes, None] - logits - np.sqrt(2) * error[:, None]  # (b, classes)
    rate = rates[classes]
    reach = np.where(rate > 0, room / np.where(rate > 0, rate, 1), np.where(room > 0, np.inf, 0))
    reach[np.arange(n), classes] = np.inf
    radii = np.maximum(reach.min(1), 0) * (1 - 1e-9)  # for the rounding of these lines
    return classes, np.where(known, radii, 0)


def some_images(n: int) -> np.ndarray:
    """Test images of CIFAR-10, if they have been downloaded before; otherwise random ones."""
    from orthoconv.data import DataError, load
    from orthoconv.files import cache_dir

    try:
        return load("cifar10", cache_dir())[1].images[:n].numpy()
    except DataError:
        return np.random.default_rng(0).random((n, 3, 32, 32), dtype=np.float32)


def main(n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    images = some_images(n)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classifier.onnx"
        write_file(path, "kwlarge_cayley_cifar10")
        serve = Server(path)
        print(f"{path.stat().st_size / 1e6:.1f} MB, Lipschitz bound {serve.facts['lipschitz_bound']:.7f}")
    classes, radii = serve(images)
    for k in range(5):
        print(f"image {k}: {classes[k]}, and so is every image nearer than {radii[k]:.4f}")
    print(f"{(radii > EPS).mean():.1%} of {n} images have a certificate for 36/255, whatever their true class")
    return images, radii


if __name__ == "__main__":
    main()
