"""`orthoconv verify`: check each layer and the bound of a trained network, and attack its certificates."""

__all__ = ["VerificationError", "verify"]

from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from orthoconv import models
from orthoconv.attacks import cross_examine
from orthoconv.certificates import Verification, certify
from orthoconv.certificates import verify as verify_model
from orthoconv.data import Split, batches, load
from orthoconv.lab.machine import use_device
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import Run
from orthoconv.models.trained import run_arguments
from orthoconv.nn.reparametrized import Reparametrized, frozen

_CHUNK = 250


class VerificationError(Exception):
    """A network breaks a claim that it makes."""


def verify(
    model: str,
    data_dir: Path | None = None,
    images: int = 500,
    attack: int = 0,
    lipschitz: float | None = None,
    device: str = "auto",
) -> None:
    """Check each layer of a network and the whole, then attack its certificates. Exits with status 1 if one fails.

    Example: orthoconv verify runs/digits --attack 100

    Args:
        model: Folder of a run, or the name of a network that comes with the package.
        data_dir: Folder of the data set; by default the one of the run, or its usual place.
        images: Test images on which the rounding error of the logits is measured.
        attack: Test images, the first ones, whose certificates are cross-examined: each is attacked at 0.999 of its
            own radius by PGD (100 steps, 5 starts) and by APGD with two losses.
        lipschitz: Lipschitz bound that the network should have; by default the one that it was built with, if its
            layers promise one.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
    """
    for name, value in (("images", images), ("attack", attack)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    network, test, claimed = _open(model, data_dir)
    network = network.to(use_device(device))
    result = verify_model(network, test.first(images).images, claimed if lipschitz is None else lipschitz)
    print(_table(result))
    broken = _examine(network, test.first(attack)) if attack else 0
    faults = result.faults + [f"{broken} certified images changed their class within their radius"] * bool(broken)
    if faults:
        raise VerificationError(f"{model}: not verified:\n  " + "\n  ".join(faults))
    print(f"{model}: verified, {len(result.layers)} layers, Lipschitz bound {result.lipschitz:.7f}")


def _open(model: str, data_dir: Path | None) -> tuple[nn.Module, Split, float | None]:
    """Return the network, its test images, and the Lipschitz bound that it claims."""
    if model in models.PRETRAINED:
        card = models.card(model)
        _, test = load(card["data"], data_dir, download_bar())
        return (network := models.pretrained(model)), test, claimed_bound(network, card["model"])
    if not Path(model).is_dir():
        raise FileNotFoundError(f"{model} is neither the folder of a run nor one of {', '.join(models.PRETRAINED)}")
    run = Run(Path(model), data_dir)
    network = run.load_model()
    return network, run.load_data()[1], claimed_bound(network, run_arguments(run.folder, data_dir))


def claimed_bound(network: nn.Module, arguments: dict[str, Any]) -> float | None:
    """Return the Lipschitz bound that a network was built with, or None if one of its layers promises nothing.

    Arguments:
        network: The network.
        arguments: Arguments of `orthoconv.models.build` that it was built with.
    """
    layers = [m for m in network.modules() if isinstance(m, Reparametrized | nn.Linear)]
    if not all(isinstance(layer, Reparametrized) and layer.promise for layer in layers):
        return None
    return float(arguments.get("lipschitz") or 1) / float(min(arguments.get("std") or [1]))


def _table(result: Verification) -> str:
    width = max([5, *(len(layer.name) for layer in result.layers)])
    lines = [f"{'layer':{width}}  {'kind':22}{'input':>16}{'largest':>14}{'smallest':>14}{'forward':>10}"]
    for layer in result.layers:
        smallest = "" if layer.smallest is None else f"{layer.smallest:.9f}"
        lines.append(
            f"{layer.name:{width}}  {layer.kind:22}{'x'.join(map(str, layer.shape)):>16}{layer.largest:14.9f}"
            f"{smallest:>14}{layer.difference:10.1e}"
        )
    claimed = "" if result.claimed is None else f", claimed {result.claimed:.9g}"
    lines.append(f"Lipschitz bound {result.lipschitz:.9f}{claimed}")
    lines.append(f"largest ratio of distances that ascent found: {result.empirical:.6f}")
    lines.append(f"rounding of the logits: {result.slack:.2g} measured, {result.worst:.2g} at most")
    return "\n".join(lines)


def _examine(network: nn.Module, part: Split) -> int:
    """Attack each certified image within its radius; return how many change their class."""
    certificates = certify(network, batches(part, _CHUNK))
    network.requires_grad_(False)
    broken, points = 0, int((certificates.radius > 0).sum())
    with frozen(network):
        for k, (x, y) in enumerate(tqdm(list(batches(part, _CHUNK)), desc="cross-examination", unit="batch")):
            radius = certificates.radius[k * _CHUNK :][: len(x)]
            broken += int(cross_examine(network, x, y, radius, seed=k).sum())
    print(f"cross-examination: {points} certified images attacked at 0.999 of their radius, {broken} broken")
    return broken
