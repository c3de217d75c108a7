"""Times of every method against the plain one, in the same run: the paper's runtime tables and figure."""

__all__ = ["BATCHES", "PANELS", "PAPER", "REGIMES", "Benchmark", "columns", "orthogonium_conv"]

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv import models
from orthoconv.allocator import keep_freed_memory
from orthoconv.files import write_atomically
from orthoconv.lab.machine import code_digest, hardware
from orthoconv.lab.progress import quiet_bar
from orthoconv.lab.timing import Figures, compare, pin_threads
from orthoconv.nn import CayleyLinear, CircularConv2d, conv_methods
from orthoconv.nn.methods import conv_method

Factory = Callable[..., nn.Module]

BATCHES = {"critic": 128, "kwlarge": 256, "lipconvnet": 256, "liresnet": 256, "resnet9": 128, "wide_resnet10_10": 32}
PAPER = {  # seconds per epoch, Appendix C
    ("kwlarge", 1): {"cayley": 9.01, "bcop": 20.75, "rko": 16.02},
    ("kwlarge", 2): {"cayley": 17.50, "bcop": 53.72, "rko": 50.15},
    ("kwlarge", 3): {"cayley": 32.30, "bcop": 135.95, "rko": 131.43},
    ("kwlarge", 6): {"cayley": 133.43, "bcop": 1050.61, "rko": 1034.96},
    ("kwlarge", 8): {"cayley": 260.31},
    ("resnet9", 1): {"cayley": 43.92, "bcop": 48.04, "rko": 45.73, "plain conv": 14.56, "plain": 13.27},
    ("wide_resnet10_10", 1): {"cayley": 210.6, "bcop": 109.4, "rko": 99.46, "plain conv": 48.40, "plain": 46.10},
}
PANELS: dict[str, tuple[str, list[dict[str, int]]]] = {  # what varies, and the layers: c -> o channels, k x k, n x n
    "a": ("image size, 8 channels", [{"c": 8, "o": 8, "k": 3, "n": n} for n in (4, 8, 16, 32, 64)]),
    "b": ("image size, 64 channels", [{"c": 64, "o": 64, "k": 3, "n": n} for n in (4, 8, 16, 32)]),
    "c": ("channels, 8 x 8 images", [{"c": c, "o": c, "k": 3, "n": 8} for c in (16, 32, 64, 128, 256)]),
    "d": ("channels, 32 x 32 images", [{"c": c, "o": c, "k": 3, "n": 32} for c in (4, 8, 16, 32, 64)]),
    "e": (
        "kernel size, 32 channels, 16 x 16 images",
        [{"c": 32, "o": 32, "k": k, "n": 16} for k in (1, 2, 3, 5, 7, 9)],
    ),
    "f": ("out channels, 64 in, 16 x 16 images", [{"c": 64, "o": o, "k": 3, "n": 16} for o in (8, 32, 64, 128, 256)]),
}
REGIMES = [  # layers c -> c of 3 x 3 taps on n x n images, b at a time
    *({"c": c, "n": n, "b": b} for c, n in ((16, 32), (64, 32), (160, 32), (320, 16), (640, 8)) for b in (4, 32, 128)),
    *({"c": c, "n": n, "b": 4} for c, n in ((64, 56), (256, 14), (512, 7))),
    {"c": 64, "n": 224, "b": 1},
]


def columns(kind: str) -> list[str]:
    """Return everything that can be timed: the registered methods, and two ways of others.

    Arguments:
        kind: "networks", which can also have plain convolutions with orthogonal linear layers, "layers" or "regimes".
    """
    methods = [name for name in conv_methods() if name != "plain"]
    return ["plain", *(["plain conv"] if kind == "networks" else []), *methods, "listing", "orthogonium"]


class Benchmark:
    """One run of `orthoconv bench`: its columns, and the figures so far.

    Arguments:
        kind: "networks", "layers" or "regimes".
        methods: Columns; None for all.
        rounds: Steps of each method that are measured.
        threads: Threads to use.
        keep_memory: Whether the allocator keeps freed memory.
        out: Folder of the JSON file and the picture.
        device: Device that computes.
    """

    def __init__(
        self,
        kind: str,
        methods: Sequence[str] | None,
        rounds: int,
        threads: int | None,
        keep_memory: bool,
        out: Path,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        known = columns(kind)
        methods = known if methods is None else methods
        if "plain" not in methods:
            raise ValueError(f"methods must include plain, which the others are compared with; got {list(methods)}")
        if unknown := [m for m in methods if m not in known]:
            raise ValueError(f"methods must be among {', '.join(known)}, got {', '.join(unknown)}")
        if rounds < 1:
            raise ValueError(f"rounds must be positive, got {rounds}")
        self.kind, self.rounds, self.path, self.device = kind, rounds, out / f"{kind}.json", device
        self.listing, self.orthogonium = _listing(), orthogonium_conv()
        absent = {"listing": self.listing is None, "orthogonium": self.orthogonium is None}
        self.methods = [m for m in methods if not absent.get(m)]
        self.cases: list[dict[str, Any]] = []
        threads = pin_threads(threads)
        self.keeps = keep_memory and keep_freed_memory()
        print(
            f"{threads} threads, torch {torch.__version__}, {rounds} rounds, freed memory is "
            f"{'kept' if self.keeps else 'given back'}; medians of forward + backward, and ratios"
        )
        for m in (m for m in methods if absent.get(m)):
            print(f"{m} is left out: {'no folder benchmarks here' if m == 'listing' else 'pip install orthogonium'}")

    def conv(self, method: str) -> Factory:
        """Return the convolution of a method."""
        if method == "listing":
            return self.listing.ListingConv2d  # type: ignore[union-attr, no-any-return]
        return _padded(self.orthogonium) if method == "orthogonium" else conv_method(method)  # type: ignore[arg-type]

    def network(self, method: str, name: str, width: int) -> nn.Module:
        """Build a network with the layers of a method."""
        if method in conv_methods():
            return models.build(name, conv=method, width=width)
        model = models.build(name, conv="plain", width=width)
        linear = {"listing": self.listing.ListingLinear} if method == "listing" else {}  # type: ignore[union-attr]
        conv = CircularConv2d if method == "plain conv" else self.conv(method)
        return _replace(model, conv, linear.get(method, CayleyLinear))

    def run(self, case: dict[str, Any], built: dict[str, nn.Module], x: Tensor, paper: dict[str, float]) -> None:
        """Measure one case and print its table."""
        name = ", ".join(f"{k} {v}" for k, v in case.items() if k not in {"panel", "title"})
        turns = 2 * (self.rounds + 1) * len(built)
        built = {method: model.to(self.device) for method, model in built.items()}
        x = x.detach().to(self.device).requires_grad_(x.requires_grad)
        with quiet_bar(name, turns) as bar:
            figures = compare(built, x, self.rounds, bar.update)
        self.cases.append({**case, "paper": paper, "figures": {m: vars(f) for m, f in figures.items()}})
        self._write()
        print(f"\n{name}\n{_table(figures, paper)}", flush=True)

    def draw(self, plot: Callable[[Path, list[dict[str, Any]]], Path]) -> None:
        """Draw the picture, and print where everything is."""
        print(f"\n{self.path}\n{plot(self.path.with_suffix('.png'), self.cases)}")

    def _write(self) -> None:
        """Write the figures so far: they are kept if the rest is stopped."""
        settings = {"bench": self.kind, "rounds": self.rounds, "keep_memory": self.keeps, "code": code_digest()}
        text = json.dumps({**settings, "hardware": hardware(self.device), "cases": self.cases}, indent=1)
        write_atomically(self.path, text.encode())


def _table(figures: dict[str, Figures], paper: dict[str, float]) -> str:
    """Return ratios to plain and to Cayley, one line per method."""
    plain, cayley = figures["plain"], figures.get("cayley")
    lines = [f"{'':14}{'ms':>9}{'spread':>8}{'x plain':>9}{'x Cayley':>10}{'eval x':>8}{'memory x':>10}  paper"]
    for name, f in figures.items():
        to_cayley = f.train_median / cayley.train_median if cayley else math.nan
        memory = f.peak / plain.peak if plain.peak else math.nan
        bases = [base for base in ("plain", "cayley") if {name, base} <= set(paper)]
        lines.append(
            f"{name:14}{1e3 * f.train_median:9.1f}{f.spread:8.0%}{f.train_median / plain.train_median:9.2f}"
            f"{to_cayley:10.2f}{f.evaluate_median / plain.evaluate_median:8.2f}{memory:10.2f}"
            f"  {', '.join(f'{paper[name] / paper[base]:.2f} x {base}' for base in bases)}"
        )
    return "\n".join(lines)


def _replace(model: nn.Module, conv: Factory, linear: Factory) -> nn.Module:
    """Replace the plain layers of a model."""
    for name, child in model.named_children():
        if isinstance(child, CircularConv2d):
            i, o, k, s = child.in_channels, child.out_channels, child.kernel_size[0], child.stride[0]
            setattr(model, name, conv(i, o, k, stride=s))
        elif isinstance(child, nn.Linear):
            setattr(model, name, linear(child.in_features, child.out_features))
        else:
            _replace(child, conv, linear)
    return model


def _listing() -> ModuleType | None:
    """Return the algorithm of the paper's Appendix E, which is not part of the package."""
    path = Path(__file__).parents[2] / "benchmarks" / "listing.py"
    spec = importlib.util.spec_from_file_location("listing", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def orthogonium_conv() -> Factory | None:
    """Return orthogonium's AOC convolution, or None without that package."""
    try:
        from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d
    except ImportError:
        return None
    layer: Factory = AdaptiveOrthoConv2d
    return layer


def _padded(layer: Factory) -> Factory:
    """Return orthogonium's convolution with the padding that keeps, or halves, the image."""

    def conv(i: int, o: int, k: int, stride: int = 1) -> nn.Module:
        padding = "same" if stride == 1 else (k - 1) // 2
        return layer(i, o, k, stride=stride, padding=padding, padding_mode="circular")

    return conv
