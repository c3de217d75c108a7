"""`orthoconv evaluate`: a row of the paper's tables, and the evidence for it."""

__all__ = ["BrokenCertificateError", "evaluate", "evaluate_model", "table"]

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn
from tqdm import tqdm

from orthoconv.attacks import L2Ball, apgd, pgd
from orthoconv.certify import EPS, certify
from orthoconv.data import Split, batches, load
from orthoconv.files import write_atomically
from orthoconv.lab.progress import download_bar
from orthoconv.lab.runs import Run, append_record, hardware, run_record
from orthoconv.lipschitz import empirical_lipschitz
from orthoconv.nn.memory import frozen

_CHUNK = 500
_TRIES = [0.05 * 1.25**k for k in range(24)]  # norms at which the gallery is attacked
_GALLERY = 8


class BrokenCertificateError(Exception):
    """An attack changed the class of a certified example: the certificate, or the code behind it, is wrong."""


def evaluate(
    run: Path,
    data_dir: Path | None = None,
    eps: float = 36 / 255,
    certified_eps: Sequence[float] = EPS,
    attack_examples: int = 1000,
    apgd_iterations: int = 100,
    seed: int = 0,
    record: Path | None = None,
) -> None:
    """Certify the whole test set of a run; attack a part of it by PGD and by AutoAttack's APGD with both losses.

    Args:
        run: Folder of the run.
        data_dir: Where the data set is; by default where it usually is.
        eps: Norm of the attacks.
        certified_eps: Norms to report certified accuracy for.
        attack_examples: Test images to attack, the first ones; 0 for all.
        apgd_iterations: Iterations of each APGD.
        seed: Seed of the attacks.
        record: File of results, JSON lines, to append the whole run to: configuration, metrics, evaluation.
    """
    folder = Run(run)
    config = folder.config
    training, test = load(config["data"], data_dir, download_bar())
    model = folder.load_model(training)
    row = evaluate_model(
        model, test, folder, eps=eps, certified_eps=certified_eps, attack_examples=attack_examples,
        apgd_iterations=apgd_iterations, seed=seed,
    )  # fmt: skip
    print(table({config["model"]["conv"]: row}))
    print(f"evaluation: {folder.evaluation_path}")
    if record is not None:
        append_record(record, run_record(folder))
        print(f"record: {record}")


def evaluate_model(
    model: nn.Module,
    test: Split,
    folder: Run,
    *,
    eps: float = 36 / 255,
    certified_eps: Sequence[float] = EPS,
    attack_examples: int = 1000,
    apgd_iterations: int = 100,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures of a model, also written to the folder of its run, with the tensors that show them.

    Raises:
        BrokenCertificateError: If a certified example was broken; the evidence is in broken.safetensors.
    """
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps!r}")
    model = model.eval().requires_grad_(False)
    found = certify(model, batches(test, _CHUNK), sorted({*certified_eps, eps}))
    n = min(attack_examples or len(test.labels), len(test.labels))
    part, radius = test.first(n), found.radius[:n]
    ball, source = L2Ball(eps), torch.Generator().manual_seed(seed)
    attacks: dict[str, Callable[..., Tensor]] = {
        "pgd": partial(pgd, model, ball=ball, generator=source),
        "apgd_ce": partial(apgd, model, ball=ball, loss="ce", iterations=apgd_iterations, seed=seed),
        "apgd_dlr": partial(apgd, model, ball=ball, loss="dlr", iterations=apgd_iterations, seed=seed),
    }
    others = {e: partial(pgd, model, ball=L2Ball(e), generator=source) for e in found.eps if e != eps}
    with frozen(model):
        survived = {name: _attack(model, part, radius, eps, name, run, folder) for name, run in attacks.items()}
        curve = {e: _attack(model, part, radius, e, f"pgd at {e:.3f}", run, folder) for e, run in others.items()}
        constants = [empirical_lipschitz(model, x, eps, generator=source) for x, _ in batches(part, _CHUNK)]
    curve[eps] = survived["pgd"]
    both = survived["apgd_ce"] & survived["apgd_dlr"]
    row = {
        "clean": found.clean_accuracy,
        "certified": {f"{e:.6g}": a for e, a in found.certified_accuracy.items()},
        "certified_at_eps": found.certified_accuracy[eps],
        "lipschitz_bound": found.lipschitz,
        "examples": len(test.labels),
        "eps": eps,
        "attacked": n,
        "attacked_clean": float(found.correct[:n].double().mean()),
        **{name: float(alive.double().mean()) for name, alive in survived.items()},
        "autoattack": float(both.double().mean()),
        "pgd_curve": {f"{e:.6g}": float(alive.double().mean()) for e, alive in sorted(curve.items())},
        "empirical_lipschitz": float(torch.stack([c.max() for c in constants]).mean()),
        "apgd_iterations": apgd_iterations,
        "hardware": hardware(),
    }
    tensors = {"radius": found.radius, "labels": found.labels, "logits": found.logits, **_gallery(model, part, radius)}
    folder.folder.mkdir(parents=True, exist_ok=True)
    evidence = save({k: v.contiguous() for k, v in tensors.items()})
    write_atomically(folder.evidence_path, lambda file: file.write(evidence))
    write_atomically(folder.evaluation_path, lambda file: file.write(json.dumps(row, indent=2).encode()))
    return row


def _attack(
    model: nn.Module, part: Split, radius: Tensor, eps: float, name: str, attack: Callable[..., Tensor],
    folder: Run,
) -> Tensor:  # fmt: skip
    """Which examples keep their class; an example that is certified and does not is an error."""
    alive = []
    chunks = list(batches(part, _CHUNK))
    for x, y in tqdm(chunks, desc=name, unit="batch", leave=False, disable=not sys.stderr.isatty()):
        adversarial = attack(x, y)
        with torch.no_grad():
            alive.append((model(adversarial).argmax(1) == y) & (model(x).argmax(1) == y))
        lost = ~alive[-1] & (radius[sum(map(len, alive[:-1])) :][: len(x)] > eps)
        if bool(lost.any()):
            path = folder.folder / "broken.safetensors"
            folder.folder.mkdir(parents=True, exist_ok=True)
            save_file({"images": x[lost], "adversarial": adversarial[lost].contiguous(), "labels": y[lost]}, path)
            raise BrokenCertificateError(
                f"{name} broke {int(lost.sum())} examples that were certified for eps = {eps:.4g}; "
                f"the evidence is {path}"
            )
    return torch.cat(alive)


def _gallery(model: nn.Module, part: Split, radius: Tensor) -> dict[str, Tensor]:
    """Some examples, from the smallest to the largest radius, with the smallest perturbation that PGD found."""
    order = radius.argsort()
    order = order[radius[order] > 0]
    picks = order[torch.linspace(0, max(len(order) - 1, 0), min(_GALLERY, len(order))).long()]
    x, y = part.images[picks], part.labels[picks]
    best, norms, source = x.clone(), torch.full((len(x),), float("inf")), torch.Generator().manual_seed(0)
    for eps in _TRIES if len(x) else []:
        adversarial = pgd(model, x, y, L2Ball(eps), iterations=20, generator=source)
        with torch.no_grad():
            broken = model(adversarial).argmax(1) != y
        distance = (adversarial - x).flatten(1).norm(dim=1)
        better = broken & (distance < norms)
        best[better], norms[better] = adversarial[better], distance[better]
    with torch.no_grad():
        classes = model(best).argmax(1) if len(x) else y
    return {
        "gallery_images": x, "gallery_adversarial": best, "gallery_labels": y, "gallery_classes": classes,
        "gallery_radius": radius[picks], "gallery_distance": norms,
    }  # fmt: skip


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Rows of the paper's tables, as text."""
    first = next(iter(rows.values()))
    columns = ["clean", "PGD", "AutoAttack", "certified", "emp. Lip", "Lip bound"]
    lines = [f"eps = {first['eps'] * 255:.0f}/255, attacks on {first['attacked']} of {first['examples']} test images"]
    lines.append(f"{'':10}" + "".join(f"{c:>12}" for c in columns))
    for name, r in rows.items():
        values = [f"{r[k]:.2%}" for k in ("clean", "pgd", "autoattack", "certified_at_eps")]
        constants = ((r["empirical_lipschitz"], 3), (r["lipschitz_bound"], 6))
        values += [f"{value:.{digits if value < 100 else 0}f}" for value, digits in constants]
        lines.append(f"{name:10}" + "".join(f"{v:>12}" for v in values))
    return "\n".join(lines)
