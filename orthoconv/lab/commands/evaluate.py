"""`orthoconv evaluate`: certify and attack the network of a run."""

__all__ = ["evaluate"]

from collections.abc import Sequence
from pathlib import Path

from orthoconv.certificates import EPS
from orthoconv.lab.evaluation import evaluate_model, table
from orthoconv.lab.machine import use_device
from orthoconv.lab.paper.records import append_record, run_record
from orthoconv.lab.runs import Run


def evaluate(
    run: Path,
    data_dir: Path | None = None,
    eps: float = 36 / 255,
    certified_eps: Sequence[float] = EPS,
    attack_examples: int = 1000,
    apgd_iterations: int = 100,
    seed: int = 0,
    record: Path | None = None,
    device: str = "auto",
    split: float | None = None,
    local: bool = False,
    attack_certified: bool = True,
) -> None:
    """Certify the whole test set of a run; attack a part of it by PGD and by AutoAttack's APGD with both losses.

    Example: orthoconv evaluate runs/digits --eps 36/255 --attack_examples 200

    Args:
        run: Folder of the run.
        data_dir: Folder of the data set; by default the one of the run. Its classes are those of the run, by name.
        eps: Norm of the attacks.
        certified_eps: Norms to report certified accuracy for.
        attack_examples: Test images to attack, the first ones; 0 for all.
        apgd_iterations: Iterations of each APGD.
        seed: Seed of the attacks.
        record: File of results, JSON lines, to append the whole run to: configuration, metrics, evaluation.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        split: Share of one's own images that are test images, if they are not in folders train and test; by default
            that of the run. 1 is for all images of a folder that the run has not seen.
        local: Whether to prove more by local certificates, for networks of affine layers and MaxMin. This takes some
            0.1 seconds an image for the networks of the package.
        attack_certified: Whether to attack images that are certified for the norm of the attack. Without, they count
            as unbroken. So all test images can be judged in a tenth of the time, but certificates are not tried.
    """
    folder = Run(run, data_dir)
    row = evaluate_model(
        folder.load_model().to(use_device(device)), folder.load_data(split)[1], folder, eps=eps,
        certified_eps=certified_eps, attack_examples=attack_examples, apgd_iterations=apgd_iterations, seed=seed,
        local=local, attack_certified=attack_certified,
    )  # fmt: skip
    print(table({folder.config["model"]["conv"]: row}))
    print(f"evaluation: {folder.evaluation_path}")
    if record is not None:
        append_record(record, run_record(folder))
        print(f"record: {record}")
