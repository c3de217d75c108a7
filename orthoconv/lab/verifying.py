"""`orthoconv verify`: whether a trained network is what it says, and whether attacks can break what it certifies."""

__all__ = ["VerificationError", "verify"]

from pathlib import Path
from typing import Any

from torch import nn
from tqdm import tqdm

from orthoconv import models
from orthoconv.attacks import cross_examine
from orthoconv.certify import certify
from orthoconv.data import Split, batches, load
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import ModelSpec, Run
from orthoconv.models.pretrained import PRETRAINED
from orthoconv.nn.memory import frozen
from orthoconv.verify import Verification
from orthoconv.verify import verify as verify_model

_CHUNK = 250


class VerificationError(Exception):
    """A network that is not what it says."""


def verify(
    model: str, data_dir: Path | None = None, images: int = 500, attack: int = 0, lipschitz: float | None = None
) -> None:
    """Check each layer of a network and the whole; then attack what it certifies. The exit status tells.

    Args:
        model: Folder of a run, or the name of a network that comes with the package.
        data_dir: Where the data set is; by default where it usually is.
        images: Test images for which the rounding of the logits is measured.
        attack: Test images, the first ones, whose certificates are cross-examined: each is attacked at 0.999 of its
            own radius by PGD (100 steps, 5 starts) and by APGD with two losses.
        lipschitz: Constant that the network should have; by default what it was built with, unless layers are plain.
    """
    network, test, claimed = _open(model, data_dir)
    found = verify_model(network, test.first(images).images, claimed if lipschitz is None else lipschitz)
    print(_table(found))
    broken = _examine(network, test.first(attack)) if attack else 0
    faults = found.faults + [f"{broken} certified images changed their class within their radius"] * bool(broken)
    if faults:
        raise VerificationError(f"{model} is not what it says:\n  " + "\n  ".join(faults))
    print(f"{model} is what it says")


def _open(model: str, data_dir: Path | None) -> tuple[nn.Module, Split, float | None]:
    """The network, test images for it, and its Lipschitz constant."""
    if model in PRETRAINED:
        card = models.card(model)
        _, test = load(card["data"], data_dir, download_bar())
        return models.pretrained(model), test, _claimed(card["model"])
    if not Path(model).is_dir():
        raise FileNotFoundError(f"{model} is neither the folder of a run nor one of {', '.join(PRETRAINED)}")
    run = Run(Path(model))
    training, test = load(run.config["data"], data_dir, download_bar())
    return run.load_model(training), test, _claimed(ModelSpec(**run.config["model"]).options(training))


def _claimed(spec: dict[str, Any]) -> float | None:
    """What a network was built to have, by the arguments of `build`; nothing for layers that promise nothing."""
    if spec["conv"] in ("plain", "svcm", "ossn") or spec.get("linear") == "plain":
        return None
    return float(spec.get("lipschitz") or 1) / float(min(spec.get("std") or [1]))


def _table(found: Verification) -> str:
    width = max([5, *(len(layer.name) for layer in found.layers)])
    lines = [f"{'layer':{width}}  {'kind':22}{'input':>16}{'largest':>14}{'smallest':>14}{'forward':>10}"]
    for layer in found.layers:
        smallest = "" if layer.smallest is None else f"{layer.smallest:.9f}"
        lines.append(
            f"{layer.name:{width}}  {layer.kind:22}{'x'.join(map(str, layer.shape)):>16}{layer.largest:14.9f}"
            f"{smallest:>14}{layer.difference:10.1e}"
        )
    claimed = "" if found.claimed is None else f", claimed {found.claimed:.9g}"
    lines.append(f"Lipschitz bound {found.lipschitz:.9f}{claimed}")
    lines.append(f"largest ratio of distances found by ascent {found.empirical:.6f}")
    lines.append(f"rounding of the logits: {found.slack:.2g} seen, {found.worst:.2g} in the worst order of all sums")
    return "\n".join(lines)


def _examine(network: nn.Module, part: Split) -> int:
    found = certify(network, batches(part, _CHUNK))
    network.requires_grad_(False)
    broken, points = 0, int((found.radius > 0).sum())
    with frozen(network):
        for k, (x, y) in enumerate(tqdm(list(batches(part, _CHUNK)), desc="cross-examination", unit="batch")):
            radius = found.radius[k * _CHUNK :][: len(x)]
            broken += int(cross_examine(network, x, y, radius, seed=k).sum())
    print(f"cross-examination: {points} certified images attacked at 0.999 of their radius, {broken} broken")
    return broken
