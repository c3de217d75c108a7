"""Whether a run may begin in a folder, or go on there; all of it is asked before anything is written."""

__all__ = ["parts_of", "require_new", "require_same", "require_same_mean"]

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orthoconv.lab.configs import Training
from orthoconv.lab.runs import Run
from orthoconv.nn.arguments import positive_int
from orthoconv.train import CheckpointError


def parts_of(training: Training) -> list[Training]:
    """Return what is trained for a network: itself, or its members, each without the mirror image and with its seed."""
    model, recipe = replace(training.model, members=1, mirror=False), training.recipe
    parts = []
    for k in range(positive_int("members", training.model.members)):
        start = f"{training.start}#{k}" if training.start and training.model.members > 1 else training.start
        parts.append(replace(training, model=model, recipe=replace(recipe, seed=recipe.seed + k), start=start))
    return parts


def require_new(*runs: Run) -> None:
    """Refuse folders that have metrics or a checkpoint already."""
    for run in runs:
        if run.metrics_path.exists() or run.checkpoint_path.exists():
            raise FileExistsError(f"{run.folder} has a run already; continue it with --resume, or pass another --out")


def require_same(run: Run, training: Training) -> None:
    """Refuse to resume with another data set or network, or with another recipe once there is something to resume."""
    if run.config_path.exists():
        _require_equal(run.folder, run.training, training, _has_begun(run))


def require_same_mean(run: Run, members: Sequence[Run], training: Training) -> None:
    """Refuse to resume a mean or a mirror whose settings differ; a mean may get more members.

    Arguments:
        run: Folder of the whole.
        members: Folders of its members, with or without a run.
        training: What is to be trained now.
    """
    if run.config_path.exists():
        before, count = run.training, training.model.members
        if parts_of(before) != [before] and before.model.members < count:
            before = replace(before, model=replace(before.model, members=count))
        _require_equal(run.folder, before, training, any(map(_has_begun, [run, *members])))
    for member, part in zip(members, parts_of(training), strict=True):
        require_same(member, part)


def _has_begun(run: Run) -> bool:
    return any(path.exists() for path in (run.checkpoint_path, run.metrics_path, run.weights_path))


def _require_equal(folder: Path, before: Training, now: Training, begun: bool) -> None:
    old, new = before.config, now.config
    for part in ("data", "model", "examples", "resize", "split", "data_seed", "start"):
        if old.get(part) != new.get(part):
            raise CheckpointError(f"{folder} is a run with {part} {old.get(part)}, not {new.get(part)}")
    names = sorted({*old["recipe"], *new["recipe"]})
    changed = [name for name in names if old["recipe"].get(name) != new["recipe"].get(name)]
    if changed and begun:
        values = [getattr(one.recipe, changed[0]) for one in (before, now)]
        raise CheckpointError(
            f"{folder} is of a run with {changed[0]}={values[0]!r}, not {values[1]!r}; "
            "a run is resumed with the recipe it began with"
        )
