"""`orthoconv demo`: train, certify and attack on digits, in under two minutes."""

__all__ = ["demo"]

from dataclasses import replace
from pathlib import Path

import torch
from matplotlib import cbook
from matplotlib import image as mpl_image
from torch import Tensor, nn

from orthoconv.data import Split
from orthoconv.lab.configs import ModelSpec, Training
from orthoconv.lab.evaluation import evaluate_model, table
from orthoconv.lab.machine import use_device
from orthoconv.lab.plots import plot_demo
from orthoconv.lab.reports import write_report
from orthoconv.lab.runs import Run
from orthoconv.lab.training import train_run
from orthoconv.nn import BaseConv2d, CayleyConv2d
from orthoconv.nn.arguments import positive_int
from orthoconv.testing import norm_ratios
from orthoconv.train import Recipe

_LAYER = 2  # the convolution that is drawn: 16 -> 32 channels


def demo(
    out: Path = Path("runs/demo"),
    epochs: int = 20,
    attack_examples: int = 200,
    apgd_iterations: int = 50,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Train, certify and attack a Cayley network and the same network of plain layers on handwritten digits.

    Example: orthoconv demo --out runs/demo

    Args:
        out: Folder for the two runs, the report and a picture of one layer. An earlier demo there is overwritten.
        epochs: Passes over the 1,297 training images.
        attack_examples: Test images to attack.
        apgd_iterations: Iterations of each APGD.
        seed: Seed of the weights, the order of the images and the attacks.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    place = use_device(device)
    recipe = Recipe(epochs=epochs, batch_size=64, augment=False, seed=seed)
    positive_int("apgd_iterations", apgd_iterations)  # before the training, not after it
    rows, runs = {}, {conv: Run(out / conv) for conv in ("cayley", "plain")}
    for conv, run in runs.items():
        _require_demo(run, _training(conv, recipe))
    for conv, run in runs.items():
        _remove_files(run)
        print(f"\n{conv} layers")
        train_run(run, _training(conv, recipe), device=place)
        test = run.load_data()[1]
        rows[conv] = evaluate_model(
            run.load_model().to(place), test, run, attack_examples=attack_examples, apgd_iterations=apgd_iterations,
            seed=seed,
        )  # fmt: skip
    print(f"\n{table(rows)}\n\nEvery certified image survived every attack.")
    picture = _picture(out, runs, test)
    print(f"\npicture of a layer: {picture}")
    print(f"report: {write_report(out / 'cayley', [out / 'plain'], place)}")


def _training(conv: str, recipe: Recipe) -> Training:
    return Training("digits", ModelSpec(conv=conv, width=0.5), recipe)


def _require_demo(run: Run, training: Training) -> None:
    """Refuse a folder with a run that is not of an earlier demo, whatever its epochs and its seed were."""
    if run.config_path.exists():
        before = run.training
        recipe = replace(training.recipe, epochs=before.recipe.epochs, seed=before.recipe.seed)
        if before.config == replace(training, recipe=recipe).config:
            return
    elif not (run.metrics_path.exists() or run.checkpoint_path.exists() or run.weights_path.exists()):
        return
    raise FileExistsError(f"{run.folder} has a run that is not of a demo; move it away, or pass another --out")


def _remove_files(run: Run) -> None:
    """Remove what an earlier demo has written, and no other file."""
    paths = (run.config_path, run.metrics_path, run.checkpoint_path, run.initial_path, run.weights_path)
    for path in (*paths, run.evaluation_path, run.evidence_path, run.folder / "broken.safetensors"):
        path.unlink(missing_ok=True)


def _picture(out: Path, runs: dict[str, Run], test: Split) -> Path:
    """Draw singular values and norms of one layer of each network, and an exact inverse on a photograph."""
    before, after, ratios = {}, {}, {}
    for name, run in runs.items():
        (old, _), (new, inputs) = (_layer(run.load_model(path), test) for path in (run.initial_path, None))
        size = (inputs.shape[-2], inputs.shape[-1])
        before[name], after[name] = (layer.singular_values(size).flatten() for layer in (old, new))
        ratios[name] = norm_ratios(new, inputs)
    photo = _photograph()
    layer = CayleyConv2d(3, 3, 9, bias=False).requires_grad_(False)
    layer.g.mul_(6)  # far from the identity
    image = layer(photo)
    back = layer.inverse(image)
    print(f"\nphotograph of {photo.shape[1]} x {photo.shape[2]} through a layer with 9 x 9 taps:")
    print(f"|conv(x)| / |x| = {norm_ratios(layer, photo[None]).item():.7f}, ", end="")
    print(f"largest error of layer.inverse(layer(x)) in float32: {(back - photo).abs().max():.1e}")
    return plot_demo(out / "layer.png", before, after, ratios, [photo, image, back])


@torch.no_grad()
def _layer(model: nn.Sequential, test: Split) -> tuple[BaseConv2d, Tensor]:
    """Return the convolution that is drawn, and the test images as they reach it."""
    x, seen = test.images, 0
    for module in model:
        if isinstance(module, BaseConv2d):
            if seen == _LAYER:
                return module, x
            seen += 1
        x = module(x)
    raise AssertionError("the network has fewer convolutions")


def _photograph() -> Tensor:
    """Return a photograph that comes with matplotlib (Grace Hopper, in the public domain): (3, h, w) in [0, 1]."""
    path = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    return torch.tensor(mpl_image.imread(path)).permute(2, 0, 1) / 255
