"""A certified classifier served from an ONNX file: the server needs onnxruntime and NumPy, and nothing else.

python examples/serve_onnx.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime


def train_and_export(path: Path, epochs: int) -> np.ndarray:
    """What is done once: train, export, and put into the file what certificates need."""
    import onnx
    import torch

    from orthoconv import lipschitz_bound, models, rounding_bound, to_onnx
    from orthoconv.data import load
    from orthoconv.train import Recipe, fit

    torch.manual_seed(0)
    training, test = load("digits")
    model = models.build("kwlarge", width=0.5, in_channels=1, image_size=8)
    recipe = Recipe(epochs=epochs, batch_size=64, augment=False)
    for figures in fit(model, training, recipe, path.with_suffix(".checkpoint")):
        print(f"epoch {figures['epoch']}: {figures['accuracy']:.1%} of the training images")
    to_onnx(model, test.images[:8], path)
    program = onnx.load(path)
    bound, slack = lipschitz_bound(model.eval(), (1, 8, 8)), rounding_bound(model, (1, 8, 8), norm=8.0)
    onnx.helper.set_model_props(program, {"lipschitz_bound": json.dumps(bound), "slack": json.dumps(slack)})
    onnx.save(program, path)
    return test.images.numpy()


class Server:
    """Classes and certified radii for images, by an ONNX file."""

    def __init__(self, path: Path) -> None:
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        facts = self.session.get_modelmeta().custom_metadata_map
        self.lipschitz, self.slack = json.loads(facts["lipschitz_bound"]), json.loads(facts["slack"])

    def __call__(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (logits,) = self.session.run(None, {"images": images})
        ordered = np.sort(logits, axis=1)
        radii = ((ordered[:, -1] - ordered[:, -2]) / np.sqrt(2) - self.slack) / self.lipschitz
        return logits.argmax(1), np.maximum(radii, 0)


def main(epochs: int = 10) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classifier.onnx"
        images = train_and_export(path, epochs)
        serve = Server(path)
        print(f"{path.stat().st_size / 1e6:.1f} MB, Lipschitz bound {serve.lipschitz:.6f}")
        classes, radii = serve(images)
        for k in range(5):
            print(f"image {k}: class {classes[k]}, and so is every image nearer than {radii[k]:.3f}")
    return radii


if __name__ == "__main__":
    main()
