"""What a trained network of one method is compared by: accuracy, cost, orthogonality, and what attacks find."""

__all__ = ["measure_method"]

import statistics

import torch
from torch import Tensor, nn

from orthoconv import models
from orthoconv.attacks import L2Ball, cross_examine, pgd
from orthoconv.certificates import certify, verify
from orthoconv.data import batches
from orthoconv.lab.progress import quiet_bar
from orthoconv.lab.runs import Run
from orthoconv.lab.timing import compare
from orthoconv.models.trained import run_arguments

_CHUNK = 500
_EPS = (36, 72, 108)  # over 255
_PROBES = 8
_SIZES = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)  # of perturbations, in certified radii
_ITERATIONS = 20


def measure_method(
    run: Run, *, examine: int = 200, rounds: int = 5, iterations: int = 100, restarts: int = 5
) -> dict[str, float]:
    """Measure the trained network of a run.

    Arguments:
        run: A run that is trained.
        examine: Test images, the first ones, whose certificates are attacked.
        rounds: Training steps that are timed, after two that are not.
        iterations: Steps of each attack of the cross-examination.
        restarts: Random starts of PGD in the cross-examination.

    Returns:
        Accuracy in %: clean, certified_36, certified_72, certified_108. The time of a training step, forward and
        backward, relative to that of the same network with plain layers, and its memory in MB at the peak. The smallest
        and largest singular value of the layers before the head; only the largest Lipschitz constant where they are not
        linear. The number of images examined, how many of them an attack broke at 0.999 of their radius, and the
        largest ratio of a radius to the norm of a perturbation that changes the class; a sound certificate keeps it
        below 1.
    """
    train, test = run.load_data()
    model = run.load_model().requires_grad_(False)
    certificates = certify(model, batches(test, _CHUNK), [eps / 255 for eps in _EPS])
    figures = {"clean": 100 * certificates.clean_accuracy}
    certified = certificates.certified_accuracy.values()
    figures |= {f"certified_{eps}": 100 * share for eps, share in zip(_EPS, certified, strict=True)}
    layers = verify(model, test.images[:_PROBES]).layers[:-1]
    if smallest := [layer.smallest for layer in layers if layer.smallest is not None]:
        figures["smallest"] = min(smallest)
    figures["largest"] = max(layer.largest for layer in layers)
    x, y, radius = test.images[:examine], test.labels[:examine], certificates.radius[:examine]
    broken = cross_examine(model, x, y, radius, iterations=iterations, restarts=restarts)
    figures |= {"examined": float((radius > 0).sum()), "broken": float(broken.sum())}
    figures["ratio"] = _largest_ratio(model, x, y, radius)
    return figures | _cost(run, train.images[: run.training.recipe.batch_size], rounds)


def _largest_ratio(model: nn.Module, x: Tensor, y: Tensor, radius: Tensor) -> float:
    """Attack at growing multiples of the radius; return the largest ratio of it to the norm of what succeeds."""
    largest, source = 0.0, torch.Generator().manual_seed(0)
    left = (radius > 0).nonzero().squeeze(1)
    for size in _SIZES:
        if not len(left):
            break
        ball = L2Ball(size * radius[left])
        attacked = pgd(model, x[left], y[left], ball, iterations=_ITERATIONS, generator=source)
        with torch.no_grad():
            changed = model(attacked).argmax(1) != y[left]
        norms = (attacked - x[left]).double().flatten(1).norm(dim=1)
        ratios = radius[left].double() / norms
        largest = max([largest, *ratios[changed].tolist()])
        left = left[~changed]
    return largest


def _cost(run: Run, x: Tensor, rounds: int) -> dict[str, float]:
    """Time training steps on a batch in turns with those of the plain network, and find their memory.

    The ratio is the median of those of single turns, since the queue's other worker slows down some of them.
    """
    plain = models.build(**{**run_arguments(run.folder), "conv": "plain", "linear": None})
    with quiet_bar("time of a step", 4 * (rounds + 1)) as bar:
        measured = compare({"plain": plain, "own": run.load_model()}, x, rounds, bar.update)
    ratios = [own / other for own, other in zip(measured["own"].train, measured["plain"].train, strict=True)]
    return {"step": statistics.median(ratios), "memory": measured["own"].peak / 2**20}
