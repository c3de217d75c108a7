"""The pictures of the documentation, from records and from the network in the package: `python docs/pictures.py`.

`python docs/pictures.py certificate` draws one of them. It needs CIFAR-10 (`orthoconv data cifar10`).
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Circle
from torch import Tensor, nn

from orthoconv import certify, fourier, frozen, models
from orthoconv.attacks import L2Ball, pgd
from orthoconv.data import batches, load
from orthoconv.nn import CayleyConv2d

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "pictures"
NETWORK = "kwlarge_cayley_cifar10"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE = 13  # of the test images: a horse with a large radius
BLUE, RED, GREY = "#1f5fbf", "#c8553d", "#8a8f98"


class Duel(nn.Module):
    """The logits of two classes of a model."""

    def __init__(self, model: nn.Module, first: int, second: int) -> None:
        super().__init__()
        self.model, self.pair = model, [first, second]

    def forward(self, x: Tensor) -> Tensor:
        """Return the first class and the second, (b, 2)."""
        logits: Tensor = self.model(x)[:, self.pair]
        return logits


def nearest_break(model: nn.Module, x: Tensor, label: Tensor, radius: float) -> Tensor:
    """Return the shortest perturbation that PGD finds to change the class, by growing balls."""
    for k in range(20):
        ball, source = L2Ball(1.5 * radius * 1.12**k), torch.Generator().manual_seed(k)
        broken = pgd(model, x, label, ball, iterations=40, step=0.05, generator=source)
        if bool(model(broken).argmax(1) != label):
            return _shortest(model, x, label, broken - x)
    raise AssertionError("PGD found no other class")


def _shortest(model: nn.Module, x: Tensor, label: Tensor, d: Tensor) -> Tensor:
    """Shorten a perturbation by bisection, as long as the class is another one."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        changed = bool(model(x + middle * d).argmax(1) != label)
        low, high = (low, middle) if changed else (middle, high)
    return high * d


def certificate(path: Path) -> None:
    """Draw a plane through the images: classes, the certified ball of one image, attacks inside and outside of it."""
    model, (_, test) = models.pretrained(NETWORK), load("cifar10")
    x, label = test.images[IMAGE : IMAGE + 1], test.labels[IMAGE : IMAGE + 1]
    radius = float(certify(model, [(x, label)]).radius)
    with frozen(model):
        outside = nearest_break(model, x, label, radius)
        taken = [int(label), int(model(x + outside).argmax())]
        third = next(c for c in model(x)[0].argsort(descending=True).tolist() if c not in taken)
        other = nearest_break(Duel(model, taken[0], third), x, torch.zeros_like(label), radius)
        source = torch.Generator().manual_seed(1)
        inside = pgd(model, x, label, L2Ball(0.999 * radius), iterations=40, generator=source) - x
        u = outside / outside.norm()
        across = other - (other * u).sum() * u
        v = across / across.norm()
        far = 2.1 * float(outside.norm())
        steps = torch.linspace(-far, far, 101)
        grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).view(-1, 2)  # (points, 2)
        with torch.no_grad():
            parts = ((part[:, :, None, None, None] * torch.stack((u[0], v[0]))).sum(1) for part in grid.split(500))
            shown = [model(x + part).argmax(1) for part in parts]
    regions = torch.cat(shown).view(len(steps), len(steps))
    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.32])
    _draw_plane(left.subplots(), regions, far, radius, float(outside.norm()))
    images = {
        "the image": (x, 0.0),
        "attack inside the ball": (x + inside, float(inside.norm())),
        "attack outside of it": (x + outside, float(outside.norm())),
    }
    _draw_images(right, model, images, x, radius)
    figure.savefig(path, dpi=110)


PALE = ("#e9eef7", "#fbe3d6", "#e6f2dd", "#efe4f4", "#fdf3cf", "#dff0ef")


def _draw_plane(axis: Axes, regions: Tensor, far: float, radius: float, outside: float) -> None:
    """Draw the classes on the plane, the ball, the image and its break."""
    names = sorted(set(regions.flatten().tolist()), key=lambda c: -int((regions == c).sum()))
    colours = {c: to_rgb(PALE[k % len(PALE)]) for k, c in enumerate(names)}
    pixels = [[colours[c] for c in row] for row in regions.tolist()]
    axis.imshow(pixels, origin="lower", extent=(-far, far, -far, far), interpolation="bilinear")
    for c in names:
        at = (regions == c).nonzero().double()
        if len(at) > 0.01 * regions.numel():
            row, column = at[(at - at.mean(0)).norm(dim=1).argmin()].tolist()
            a, b = (-far + 2 * far * k / (len(regions) - 1) for k in (column, row))
            if c == names[0]:
                a, b = -0.62 * far, 0.8 * far
            axis.text(a, b, CLASSES[c], ha="center", va="center", color="0.35", fontsize=11)
    axis.add_patch(Circle((0, 0), radius, facecolor="white", alpha=0.75, lw=0))
    axis.add_patch(Circle((0, 0), radius, fill=False, color=BLUE, lw=2.2))
    axis.text(
        0, -1.1 * radius, "certified ball:\nno other class in here", color=BLUE, ha="center", va="top", fontsize=9.5
    )
    axis.plot([0], [0], "o", color="k", ms=6)
    axis.annotate("image", (0, 0), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    axis.plot([outside], [0], "X", color=RED, ms=8)
    axis.annotate("nearest\nbreak", (outside, 0), (8, 0), textcoords="offset points", va="center", color=RED,
                  fontsize=9)  # fmt: skip
    axis.set(title="classes on a plane through the image", xlabel="l2 distance from the image")


def _draw_images(
    figure: SubFigure, model: nn.Module, images: dict[str, tuple[Tensor, float]], x: Tensor, radius: float
) -> None:
    """Draw the images, what changed in each, and what the network says."""
    axes = figure.subplots(2, len(images))
    for (name, (image, norm)), above, below in zip(images.items(), *axes, strict=True):
        logits = model(image)[0]
        said = CLASSES[int(logits.argmax())]
        above.imshow(image[0].permute(1, 2, 0).clamp(0, 1).detach().numpy())
        where = f"\nat the distance {norm:.3f}" if norm else "\n"
        above.set_title(f"{name}{where}", fontsize=10)
        if norm:
            below.imshow((0.5 + 4 * (image - x)[0].permute(1, 2, 0)).clamp(0, 1).detach().numpy())
        colour = BLUE if norm < radius else RED
        above.set_xlabel(f"“{said}”", color=colour, fontsize=12)
        below.set_xlabel("what changed, times 4" if norm else "", fontsize=8.5, color="0.4")
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
            for side in axis.spines.values():
                side.set_color("0.8")
        if norm == 0:
            below.axis("off")
            below.text(0.5, 0.5, f"certified\nradius\n{radius:.3f}", ha="center", va="center", color=BLUE, fontsize=14,
                       transform=below.transAxes)  # fmt: skip


def singular_values(path: Path) -> None:
    """Draw singular values of the convolutions of the network: of the free kernels, and after the Cayley transform."""
    model, size = models.pretrained(NETWORK), {0: 32, 1: 32, 2: 16, 3: 16}
    layers = [m for m in model.modules() if isinstance(m, CayleyConv2d)]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for k, layer in enumerate(layers):
        n = size[k] // layer.stride[0]
        free = fourier.singular_values(layer.kernel.detach(), (n, n)).flatten().sort(descending=True).values
        kept = layer.singular_values((size[k], size[k])).flatten().sort(descending=True).values
        name = f"{layer.in_channels} to {layer.out_channels}" + (", stride 2" if layer.stride[0] > 1 else "")
        for axis, values in zip(axes, (free, kept), strict=True):
            axis.plot(torch.linspace(0, 100, len(values)), values, lw=2, label=name, color=colormaps["viridis"](k / 4))
    axes[0].set(title="before the Cayley transform", ylabel="singular value", xlabel="% of them")
    axes[1].set(title="after it: all of them are 1", xlabel="% of them", ylim=(0, None))
    axes[0].legend(frameon=False, title="convolution")
    _tidy(axes)
    figure.savefig(path)


def certified_curve(path: Path) -> None:
    """Draw the certified accuracy of the network in the package against the radius, and its accuracy under PGD."""
    model, (_, test) = models.pretrained(NETWORK), load("cifar10")
    radius = certify(model, batches(test, 500), rounding=False).radius  # rounding takes 4e-6, which nobody could see
    lines = (ROOT / "results" / "kwlarge_provable.jsonl").read_text().splitlines()
    record = next(r for r in map(json.loads, lines) if r["hash"] == models.card(NETWORK)["hash"])["evaluation"]
    grid = torch.linspace(0, 1.1, 400)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    share = [100 * float((radius > e).double().mean()) for e in grid]
    axis.fill_between(grid, share, color=BLUE, alpha=0.15, lw=0)
    axis.plot(grid, share, color=BLUE, lw=2, label="certified: no attack leaves less")
    points = [(0.0, 100 * record["clean"])] + [(float(e), 100 * a) for e, a in record["pgd_curve"].items()]
    axis.plot(*zip(*points, strict=True), "--o", color=RED, ms=4, label="left by PGD")
    for k in (36, 72, 108):
        axis.axvline(k / 255, color="0.85", lw=1, zorder=0)
        axis.text(k / 255, 97, f" {k}/255", color="0.4", fontsize=8, va="top")
    axis.set(xlabel="l2 norm of the perturbation", ylabel="test images, %", xlim=(0, 1.1), ylim=(0, 100))
    axis.legend(frameon=False)
    _tidy([axis])
    figure.savefig(path)


_EPOCHS = {"brief": "two", "short": "ten"}


def methods(path: Path) -> None:
    """Draw what each method certifies against the time of a step, from results/methods.jsonl.

    Each network is drawn at the budget that has most of its methods; of two that have as many, at the larger one.
    """
    records = [json.loads(line) for line in (ROOT / "results" / "methods.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes, points = figure.subplots(1, 2), []
    for network, axis in zip(("KWLarge", "LipConvNet"), axes, strict=True):
        by_budget = [[r for r in records if r["budget"] == b and r["series"].startswith(network)] for b in _EPOCHS]
        drawn = max(reversed(by_budget), key=len)
        found = {r["series"].partition(" ")[2]: (r["metrics"]["step"], r["metrics"]["certified_36"]) for r in drawn}
        found = {method: at for method, at in found.items() if at[1] > 25}  # plain, lires and svcm certify far less
        for method, at in found.items():
            axis.plot(*at, "o", color=BLUE if method == "cayley" else GREY, ms=6)
        epochs = _EPOCHS[drawn[0]["budget"]]
        axis.set(
            xlabel="time of a training step, plain network = 1", title=f"{network} after {epochs} epochs of CIFAR-10"
        )
        axis.set_xscale("log")
        axis.set_xticks(ticks := [1, 1.5, 2, 3, 4], map(str, ticks))
        axis.minorticks_off()
        axis.margins(x=0.15)
        points.append(found)
    axes[0].set(ylabel="certified at 36/255, %")
    _tidy(list(axes))
    figure.canvas.draw()  # for the layout, in which the names find their places
    for axis, found in zip(axes, points, strict=True):
        _label(axis, found)
    figure.savefig(path)


def _label(axis: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write the name of each point beside it, where it meets no other name and no point."""
    at = {name: axis.transData.transform(point) for name, point in points.items()}
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in at.values()]
    for name, (x, y) in at.items():
        wide = 7 * len(name)
        places = [(7, 3, "left"), (7, -14, "left"), (-7, 3, "right"), (-7, -14, "right")]
        boxes = []
        for right, up, side in places:
            left = x + right - (wide if side == "right" else 0)
            boxes.append((left, y + up, left + wide, y + up + 11))
        free = [all(a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1] for b in taken) for a in boxes]
        chosen = free.index(True) if True in free else 0
        taken.append(boxes[chosen])
        right, up, side = places[chosen]
        axis.annotate(name, points[name], (right, up), textcoords="offset pixels", ha=side, fontsize=8)


_KINDS = {"conv": BLUE, "linear": "#2a9d8f", "MaxMin": "#d3d7de"}


def timeline(path: Path) -> None:
    """Draw one training step of KWLarge layer by layer, from results/timeline.json."""
    record = json.loads((ROOT / "results" / "timeline.json").read_text())
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axis = figure.subplots()
    longest = max(end for spans in record["methods"].values() for _, _, end in spans)
    for row, spans in enumerate(record["methods"].values()):
        for name, start, end in spans:
            kind, _, way = name.partition(" ")
            axis.barh(row, end - start, left=start, height=0.6, color=_KINDS.get(kind, GREY), edgecolor="white", lw=0.7)
            if end - start > 0.05 * longest:
                colour = "black" if kind == "MaxMin" else "white"
                axis.text((start + end) / 2, row, f"{kind}\n{way}", ha="center", va="center", fontsize=7, color=colour)
    axis.set(yticks=range(len(record["methods"])), yticklabels=list(record["methods"]), xlabel="milliseconds")
    axis.set_title(f"one training step of KWLarge, batch {record['batch']}, {record['hardware']['cpu']}, one thread")
    axis.invert_yaxis()
    _tidy([axis])
    figure.savefig(path)


def _tidy(axes: Iterable[Axes]) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


PICTURES: dict[str, Callable[[Path], None]] = {
    "certificate.png": certificate,
    "singular_values.png": singular_values,
    "certified_curve.png": certified_curve,
    "methods.png": methods,
    "timeline.png": timeline,
}


def main(chosen: list[str]) -> None:
    """Draw the pictures that are named, or all."""
    for name, draw in PICTURES.items():
        if not chosen or name.partition(".")[0] in chosen:
            draw(OUT / name)
            print(f"{OUT / name}: {(OUT / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
