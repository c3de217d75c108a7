"""A row of the paper's tables for a model, and the evidence for it."""

__all__ = ["BrokenCertificateError", "evaluate_model", "table"]

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from orthoconv.attacks import L2Ball, apgd, empirical_lipschitz, pgd
from orthoconv.certificates import EPS, Certificates, certify
from orthoconv.data import Split, batches
from orthoconv.devices import device_of, move
from orthoconv.files import write_atomically
from orthoconv.lab.machine import hardware
from orthoconv.lab.progress import quiet_bar
from orthoconv.lab.runs import Run
from orthoconv.nn.arguments import positive_int
from orthoconv.nn.reparametrized import frozen

_CHUNK = 500
_TRIES = [0.05 * 1.25**k for k in range(24)]  # norms at which the images of the gallery are attacked
_GALLERY = 8
_LEAST_FOR_RATIO = 3  # classes; with fewer there is no difference of logits ratio, and APGD takes another start instead


class BrokenCertificateError(Exception):
    """An attack changed the class of a certified example: the certificate, or the code behind it, is wrong."""


def evaluate_model(
    model: nn.Module,
    test: Split,
    run: Run,
    *,
    eps: float = 36 / 255,
    certified_eps: Sequence[float] = EPS,
    attack_examples: int = 1000,
    apgd_iterations: int = 100,
    seed: int = 0,
    local: bool = False,
    attack_certified: bool = True,
) -> dict[str, Any]:
    """Certify and attack a model; write the figures and the tensors behind them to the folder of its run.

    The options are those of `orthoconv evaluate`.

    Raises:
        BrokenCertificateError: If a certified example was broken; the evidence is in broken.safetensors.
    """
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps!r}")
    if bad := [e for e in certified_eps if not 0 <= e < math.inf]:
        raise ValueError(f"certified_eps must be finite numbers from 0, got {bad[0]!r}")
    positive_int("apgd_iterations", apgd_iterations)
    model = model.eval().requires_grad_(False)
    certificates = certify(model, batches(test, _CHUNK), sorted({*certified_eps, eps}), local=local)
    n = min(attack_examples or len(test.labels), len(test.labels))
    part, radius, source = test.first(n), certificates.radius[:n], torch.Generator().manual_seed(seed)
    attacks = _attacks(model, eps, apgd_iterations, certificates.logits.shape[1], seed, source)
    others = {e: partial(pgd, model, ball=L2Ball(e), generator=source) for e in certificates.eps if e != eps}
    with frozen(model):
        against = partial(_attack, model, part, certificates, run, attack_certified)
        survived = {name: against(eps, name, attack) for name, attack in attacks.items()}
        curve = {e: against(e, f"pgd at {e:.3f}", attack) for e, attack in others.items()}
        constants = [empirical_lipschitz(model, x, eps, generator=source).max() for x, _ in batches(part, _CHUNK)]
    curve[eps] = survived["pgd"]
    survived["autoattack"] = survived["apgd_ce"] & survived["apgd_dlr"]
    row = {
        "clean": certificates.clean_accuracy,
        "certified": {f"{e:.6g}": a for e, a in certificates.certified_by_lipschitz.items()},
        "certified_at_eps": certificates.certified_by_lipschitz[eps],
        **_locally(certificates, eps),
        "lipschitz_bound": certificates.lipschitz,
        "examples": len(test.labels),
        "eps": eps,
        "attacked": n,
        "attacked_certified": attack_certified,
        "attacked_clean": float(certificates.correct[:n].double().mean()),
        **{name: float(alive.double().mean()) for name, alive in survived.items()},
        "pgd_curve": {f"{e:.6g}": float(alive.double().mean()) for e, alive in sorted(curve.items())},
        **_by_class(certificates.correct, certificates.radius > eps, test),
        "empirical_lipschitz": float(torch.stack(constants).mean()),
        "rounding_slack": 0.0 if certificates.slack is None else float(certificates.slack.max()),
        "apgd_iterations": apgd_iterations,
        "hardware": hardware(device_of(model)),
    }
    evidence = {"radius": certificates.radius, "labels": certificates.labels, "logits": certificates.logits}
    evidence |= _gallery(model, part, radius)
    write_atomically(run.evidence_path, save({k: v.contiguous() for k, v in evidence.items()}))
    write_atomically(run.evaluation_path, json.dumps(row, indent=2).encode())
    return row


def _attacks(
    model: nn.Module, eps: float, iterations: int, classes: int, seed: int, source: torch.Generator
) -> dict[str, Callable[..., Tensor]]:
    """Return PGD and both APGDs at that norm, each a function of images and labels."""
    find = partial(apgd, model, ball=L2Ball(eps), iterations=iterations)
    second = partial(find, loss="dlr", seed=seed) if classes >= _LEAST_FOR_RATIO else partial(find, seed=seed + 1)
    return {
        "pgd": partial(pgd, model, ball=L2Ball(eps), generator=source),
        "apgd_ce": partial(find, loss="ce", seed=seed),
        "apgd_dlr": second,
    }


def _locally(certificates: Certificates, eps: float) -> dict[str, Any]:
    """Return the accuracy by local certificates, if there are any."""
    if certificates.by_lipschitz is None:
        return {}
    shares = certificates.certified_accuracy
    return {"certified_locally": {f"{e:.6g}": a for e, a in shares.items()}, "certified_locally_at_eps": shares[eps]}


def _by_class(correct: Tensor, certified: Tensor, test: Split) -> dict[str, Any]:
    """Return the names of the classes, and the accuracy of each, clean and certified; nothing if there are none."""
    if test.classes is None:
        return {}
    rows = {}
    for k, name in enumerate(test.classes):
        which = (test.labels == k).cpu()
        shares = [
            float(kind.cpu()[which].double().mean()) if bool(which.any()) else None for kind in (correct, certified)
        ]
        rows[name] = {"examples": int(which.sum()), "clean": shares[0], "certified": shares[1]}
    return {"classes": list(test.classes), "by_class": rows}


def _attack(
    model: nn.Module,
    part: Split,
    certificates: Certificates,
    run: Run,
    attack_certified: bool,
    eps: float,
    name: str,
    attack: Callable[..., Tensor],
) -> Tensor:
    """Return which examples of a part keep their class; raise an error if a certified one does not."""
    n = len(part.labels)
    alive, safe = certificates.correct[:n].cpu().clone(), (certificates.radius[:n] > eps).cpu()
    tried = (alive & (attack_certified | ~safe)).nonzero().squeeze(1)
    for picks in quiet_bar(name, tried.split(_CHUNK) if len(tried) else ()):
        x, y = move(model, part.images[picks], part.labels[picks])
        adversarial = attack(x, y)
        with torch.no_grad():
            alive[picks] = (model(adversarial).argmax(1) == y).cpu()
        lost = (~alive & safe)[picks]
        if bool(lost.any()):
            path = run.folder / "broken.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            evidence = {"images": x, "adversarial": adversarial, "labels": y}
            save_file({name: t.cpu()[lost].contiguous() for name, t in evidence.items()}, path)
            raise BrokenCertificateError(
                f"{name} broke {int(lost.sum())} examples that were certified for eps = {eps:.4g}; "
                f"the evidence is {path}"
            )
    return alive


def _gallery(model: nn.Module, part: Split, radius: Tensor) -> dict[str, Tensor]:
    """Pick examples from the smallest to the largest radius, each with the smallest perturbation that PGD found."""
    order = radius.argsort()
    order = order[radius[order] > 0]
    picks = order[torch.linspace(0, max(len(order) - 1, 0), min(_GALLERY, len(order))).long()]
    x, y = move(model, part.images[picks], part.labels[picks])
    best, norms, source = (
        x.clone(),
        torch.full((len(x),), float("inf"), device=x.device),
        torch.Generator().manual_seed(0),
    )
    for eps in _TRIES if len(x) else []:
        adversarial = pgd(model, x, y, L2Ball(eps), iterations=20, generator=source)
        with torch.no_grad():
            broken = model(adversarial).argmax(1) != y
        distance = (adversarial - x).flatten(1).norm(dim=1)
        better = broken & (distance < norms)
        best[better], norms[better] = adversarial[better], distance[better]
    with torch.no_grad():
        classes = model(best).argmax(1) if len(x) else y
    gallery = {
        "gallery_images": x, "gallery_adversarial": best, "gallery_labels": y, "gallery_classes": classes,
        "gallery_radius": radius[picks], "gallery_distance": norms,
    }  # fmt: skip
    return {name: t.cpu() for name, t in gallery.items()}


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return rows of the paper's tables as text: what is of all test images, then what is of the attacked ones."""
    first = next(iter(rows.values()))
    columns = ["clean", "certified", "clean*", "PGD*", "AutoAttack*", "emp. Lip*", "Lip bound"]
    lines = [f"eps = {first['eps'] * 255:.4g}/255, * attacks on {first['attacked']} of {first['examples']} test images"]
    lines.append(f"{'':10}" + "".join(f"{c:>12}" for c in columns))
    for name, r in rows.items():
        values = [f"{r[k]:.2%}" for k in ("clean", "certified_at_eps", "attacked_clean", "pgd", "autoattack")]
        constants = ((r["empirical_lipschitz"], 3), (r["lipschitz_bound"], 6))
        values += [f"{value:.{digits if value < 100 else 0}f}" for value, digits in constants]
        lines.append(f"{name:10}" + "".join(f"{v:>12}" for v in values))
        if "certified_locally_at_eps" in r:
            lines.append(f"{'locally':10}{'':12}{r['certified_locally_at_eps']:>12.2%}")
    return "\n".join(lines)
