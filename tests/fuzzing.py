"""A fuzzer of certificates: each random model is bounded, attacked, certified, exported and compared with itself.

    python tests/fuzzing.py FIRST LAST     examines the models of these seeds, and prints what is wrong

Whatever holds is silent. "broken" is a claim that is false; "traceback" is an error that nobody raised on purpose, or
one that names no part of the model.
"""

import copy
import math
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from attempts import attack, pairs
from disguises import disguise
from grammar import Sample, is_refusal, random_model
from torch import Tensor, fx, nn

import orthoconv
from orthoconv.certificates import growth, in_double
from orthoconv.certificates.algebra import Growth
from orthoconv.margins import margin
from orthoconv.modules import in_eval_mode
from orthoconv.testing import dense_matrix

DISGUISED = 0.4  # of the models
ONNX_EVERY, VERIFY_EVERY = 25, 4
HAS_ONNX = find_spec("onnxruntime") is not None


@dataclass(frozen=True)
class Claims:
    """What is put to the test; the negative controls put false ones in its place."""

    bound: Callable[[nn.Module, tuple[int, ...]], float] = orthoconv.lipschitz_bound
    certify: Callable[..., orthoconv.Certificates] = orthoconv.certify
    export: Callable[[nn.Module, tuple[int, ...]], nn.Module] = orthoconv.export
    in_double: Callable[[nn.Module], nn.Module] = in_double


@dataclass
class Report:
    """Counts of what was done, and a sentence for each thing that is wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        return f"{counts}; {len(self.broken)} broken, {len(self.tracebacks)} tracebacks"


@dataclass(frozen=True)
class Trial:
    """One model under examination: random inputs of it, and what may be wrong by rounding."""

    sample: Sample
    x: Tensor
    report: Report
    what: str

    def broken(self, text: str) -> None:
        self.report.broken.append(f"{self.what}: {text}")

    def answer(self, name: str, f: Callable[[], Any]) -> Any:
        """Return what `f` returns; None if it refuses. An error that is no refusal is written down."""
        self.report.counts[name] += 1
        try:
            return f()
        except Exception as error:
            self.report.counts[f"{name} refused"] += 1
            if not is_refusal(error) or not names_a_part(self.sample.model, str(error)):
                place = traceback.format_exc(limit=-3)
                self.report.tracebacks.append(f"{self.what}: {name}: {type(error).__name__}: {error}\n{place}")
            return None

    @cached_property
    def grown(self) -> Growth | None:
        """How rounding grows in the model, if the library knows it."""
        try:
            with in_eval_mode(self.sample.model):
                grown = growth(self.sample.model, self.sample.shape, self.sample.dtype)
        except Exception:  # which is written down where the bound is asked for
            return None
        return None if grown.unknown else grown

    def error(self, x: Tensor) -> Tensor:
        """Return what rounding can do to each output: by the library's bound, or generously where there is none."""
        norms = x.detach().double().flatten(1).norm(dim=1)
        if self.grown is not None:
            return self.grown.error(norms)
        size = values(self.sample.model, x).flatten(1).norm(dim=1)
        return (1e-3 if self.sample.dtype == torch.float32 else 1e-9) * (1 + norms + size)


def names_a_part(model: nn.Module, text: str) -> bool:
    """Whether an error says which part of a model it is about: a module by class or path, a graph, the hooks of all."""
    modules = dict(model.named_modules())
    named = any(type(module).__name__ in text or f" of {name}." in text for name, module in modules.items())
    return named or "graph" in text or "hooks of all modules" in text


@torch.no_grad()
def values(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model computes from a copy of `x`, in float64."""
    return model(x.clone()).double()


# what is claimed


def check_bound(trial: Trial, bound: float) -> None:
    """Compare distances of outputs with distances of inputs, after ascent; and the norm of an affine layer."""
    for x, z in pairs(trial.sample.model, trial.x, trial.sample.seed):
        y = values(trial.sample.model, x)
        moved = distances(y, values(trial.sample.model, z))
        sums = 1 + 2 * max(x[0].numel(), y[0].numel()) * torch.finfo(torch.float64).eps  # in the distances themselves
        allowed = bound * distances(x, z) * sums + trial.error(x) + trial.error(z)
        if not bool((moved <= allowed).all()):
            k = int((moved - allowed).argmax())
            ratio = float(moved[k] / distances(x, z)[k])
            return trial.broken(f"bound {bound:.9g}, but two outputs are {ratio:.9g} times as far apart as inputs")
    if trial.sample.affine:
        check_norm(trial, bound)
    return None


def check_norm(trial: Trial, bound: float) -> None:
    shape, dtype = trial.sample.shape, trial.sample.dtype
    norm = float(torch.linalg.matrix_norm(dense_matrix(trial.sample.model, shape, dtype=dtype).double(), ord=2))
    noise = 2 * math.sqrt(math.prod(shape)) * float(trial.error(torch.eye(1, math.prod(shape)).view(1, *shape)))
    trial.report.counts["dense"] += 1
    if not norm <= bound * (1 + 1e-12) + noise:
        trial.broken(f"bound {bound:.9g}, but the norm of the dense matrix is {norm:.9g}")


def check_radius(trial: Trial, claims: Claims) -> None:
    """Attack each example within its certified radius; beyond rounding, none may get another class."""
    model, x = trial.sample.model, trial.x
    labels = values(model, x).argmax(1)
    found = trial.answer("certify", lambda: claims.certify(model, [(x, labels)]))
    if found is None:
        return
    if not bool((found.radius >= 0).all()):
        trial.broken(f"radii {found.radius.tolist()}")
    radius = found.radius.double().clamp_max(1e3)
    trial.report.counts["attacked"] += int((radius > 0).sum())
    z = attack(model, x, labels, 0.999 * radius, trial.sample.seed)
    beyond = (distances(x, z) - radius).clamp_min(0)  # by rounding of x + d
    allowed = math.sqrt(2) * (trial.error(z) + found.lipschitz * beyond)
    margins = margin(values(model, z), labels)
    if bool(((radius > 0) & ~(margins >= -allowed)).any()):
        k = int((margins + allowed).where(radius > 0, math.inf).argmin())
        trial.broken(
            f"radius {float(radius[k]):.9g}, but at {float(distances(x, z)[k]):.9g} the margin is {margins[k]}"
        )


def check_copies(trial: Trial, claims: Claims) -> None:
    """Compare the exported model, and the one in float64, with the model itself."""
    model, x = trial.sample.model, trial.x
    exported = trial.answer("export", lambda: claims.export(model, trial.sample.shape))
    double = trial.answer("in_double", lambda: claims.in_double(model))
    if reads_bytes(model):
        return
    for name, other, inputs in (("export", exported, x), ("in_double", double, x.double())):
        outputs = None if other is None else trial.answer(f"{name} run", lambda f=other, x=inputs: values(f, x))
        if outputs is None:
            continue
        away = distances(outputs, expected := values(model, x))
        if not bool((away <= 2 * trial.error(x)).all()) and bool(expected.isfinite().all()):
            trial.broken(f"{name} is off by {float(away.max()):.3g} from outputs of norm {float(expected.norm()):.3g}")


def reads_bytes(model: nn.Module) -> bool:
    """Whether a graph reads the bytes of a value as other numbers: any rounding changes them altogether."""
    return any("torch.float16" in module.code for module in model.modules() if isinstance(module, fx.GraphModule))


def check_onnx(trial: Trial) -> None:
    """Compare with onnxruntime, in float32: it lacks many operators in float64."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        if trial.answer("onnx", lambda: orthoconv.to_onnx(trial.sample.model, trial.x, path) or path) is None:
            return
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (outputs,) = session.run(None, {"images": trial.x.numpy()})
    away = distances(torch.tensor(outputs).double(), values(trial.sample.model, trial.x))
    if not bool((away <= 2 * trial.error(trial.x)).all()):
        trial.broken(f"ONNX is off by {float(away.max()):.3g}")


def check_verify(trial: Trial) -> None:
    """`verify` finds no fault in a sound model, but that a layer of an odd size misses its promise."""
    found = trial.answer("verify", lambda: orthoconv.verify(trial.sample.model, trial.x))
    for fault in found.faults if found else []:
        if "promises to be" not in fault:
            trial.broken(f"verify: {fault}")


def distances(x: Tensor, z: Tensor) -> Tensor:
    """Distance of each pair of rows, in float64."""
    return (x.double() - z.double()).flatten(1).norm(dim=1)


# the walk through the seeds


@contextmanager
def disguised(sample: Sample) -> Iterator[tuple[Sample, str]]:
    """Disguise some models, as their seeds say; hooks of all modules end with the context."""
    r = random.Random(-1 - sample.seed)
    if r.random() >= DISGUISED or not runs(sample):
        yield sample, ""
        return
    plain = copy.deepcopy(sample.model)
    done, undo = disguise(r, sample.model)
    try:
        if runs(sample):
            yield sample, done
        else:
            undo()
            yield replace(sample, model=plain), ""
    finally:
        undo()


def runs(sample: Sample) -> bool:
    """Whether a model runs, on one input and on a batch, to outputs that are finite."""
    try:
        outputs = [values(sample.model, torch.rand(b, *sample.shape, dtype=sample.dtype)) for b in (1, sample.batch)]
    except Exception:
        return False
    return all(bool(y.isfinite().all()) for y in outputs)


def inputs_of(sample: Sample) -> Tensor:
    """Random inputs: images in [0, 1], and wider ones."""
    source = torch.Generator().manual_seed(sample.seed)
    x = torch.rand(sample.batch, *sample.shape, generator=source, dtype=torch.float64)
    x[::2] = 3 * torch.randn(x[::2].shape, generator=source, dtype=torch.float64)
    return x.to(sample.dtype)


def examine(sample: Sample, done: str, report: Report, claims: Claims) -> None:
    """Put every claim about one model to the test, and write into `report` what is wrong."""
    lines = " ".join(str(sample.model).split())
    what = f"seed {sample.seed} ({sample.dtype}, {sample.shape}, batch {sample.batch}; {done or 'plain'}) {lines[:700]}"
    trial = Trial(sample, inputs_of(sample), report, what)
    report.counts["models"] += 1
    report.counts["disguised"] += bool(done)
    bound = trial.answer("bound", lambda: claims.bound(sample.model, sample.shape))
    if bound is not None:
        check_bound(trial, bound)
    with in_eval_mode(sample.model):
        outputs = values(sample.model, trial.x)
        if outputs.ndim == 2 and outputs.shape[1] > 1:
            check_radius(trial, claims)
        check_copies(trial, claims)
        if bound is not None and not done and sample.seed % VERIFY_EVERY == 0:
            check_verify(trial)
        if bound is not None and sample.seed % ONNX_EVERY == 0 and sample.dtype == torch.float32 and HAS_ONNX:
            check_onnx(trial)


def fuzz(seeds: range, claims: Claims | None = None) -> Report:
    """Examine the models of all seeds."""
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            try:
                built = random_model(seed)
            except Exception:
                report.tracebacks.append(f"seed {seed}, when it is built: {traceback.format_exc(limit=-3)}")
                continue
            with disguised(built) as (sample, done):
                if done or runs(sample):
                    examine(sample, done, report, claims or Claims())
                else:
                    report.counts["unusable"] += 1
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = fuzz(range(int(sys.argv[1]), int(sys.argv[2])))
    print("\n\n".join([*result.broken, *result.tracebacks, str(result)]))
