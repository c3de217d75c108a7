"""Pictures, each a function of the numbers it shows."""

__all__ = [
    "bench_layers",
    "bench_networks",
    "certified_curves",
    "experiment",
    "plot_demo",
    "ratios",
    "trade_off",
    "training_curves",
]

import io
import statistics
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from torch import Tensor

if TYPE_CHECKING:
    from orthoconv.lab.paper.experiment import Experiment, Row
    from orthoconv.lab.paper.tables import Cell, Table

COLOURS = {"cayley": "#1f5fbf", "plain": "#c8553d"}


def plot_demo(
    path: Path, before: dict[str, Tensor], after: dict[str, Tensor], ratios: dict[str, Tensor], images: list[Tensor]
) -> Path:
    """Draw singular values before and after training, norm ratios, and an image with its convolution and inverse."""
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    grid = figure.add_gridspec(2, 12, height_ratios=[1, 1.25])

    axes = [figure.add_subplot(grid[0, s]) for s in (slice(0, 4), slice(4, 8), slice(8, 12))]
    for axis, values, title in zip(axes, (before, after), ("before training", "after training"), strict=False):
        for name, v in values.items():
            axis.plot(sorted(v.tolist(), reverse=True), label=name, color=COLOURS[name], lw=2)
        axis.set(title=f"singular values {title}", xlabel="index", ylabel="singular value")
        axis.set_ylim(0, 1.05 * max(float(v.max()) for v in (*before.values(), *after.values())))
        axis.legend()
    low, high = (f(float(f(v.tolist())) for v in ratios.values()) for f in (min, max))
    for name, v in ratios.items():
        bins = [low + (high - low) * k / 40 for k in range(41)]
        axes[2].hist(v.tolist(), bins=bins, label=name, color=COLOURS[name], alpha=0.8)
    axes[2].set(title="norm ratio on test digits, after training", xlabel="|conv(x)| / |x|", ylabel="images")
    axes[2].set_yscale("log")
    axes[2].legend()

    titles = ["photograph x", "orthogonal convolution Qx (grey is 0)", "inverse, Q*Qx", "error, times a million"]
    photo, image, back = images
    shown = [photo, 0.5 + 0.5 * image / image.abs().quantile(0.99), back, (back - photo).abs() * 1e6]
    for k, (image, title) in enumerate(zip(shown, titles, strict=True)):
        axis = figure.add_subplot(grid[1, 3 * k : 3 * k + 3])
        axis.imshow(image.clamp(0, 1).permute(1, 2, 0).tolist())
        axis.set_title(title)
        axis.axis("off")
    figure.savefig(path, dpi=120)
    return path


def training_curves(metrics: list[dict[str, Any]]) -> str:
    """Return an SVG of the loss and of the accuracy on training and test images, by epoch."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = [m["epoch"] for m in metrics]
    loss.plot(epochs, [m["loss"] for m in metrics], color=COLOURS["cayley"])
    loss.set(title="training loss", xlabel="epoch")
    accuracy.plot(epochs, [100 * m["accuracy"] for m in metrics], color="0.6", label="training")
    accuracy.plot(epochs, [100 * m["test_accuracy"] for m in metrics], color=COLOURS["cayley"], label="test")
    radii = metrics[0]["certified"] if metrics else []
    for name, style in zip(radii, cycle(("--", ":", "-.", (0, (1, 4)))), strict=False):
        values = [100 * m["certified"][name] for m in metrics]
        accuracy.plot(epochs, values, color=COLOURS["plain"], ls=style, label=f"certified {name}")
    accuracy.set(title="accuracy, %", xlabel="epoch", ylim=(0, 100))
    accuracy.legend(fontsize=7)
    return _svg(figure)


def certified_curves(radii: dict[str, Tensor], attacked: dict[str, dict[str, float]]) -> str:
    """Return an SVG of certified accuracy, and of accuracy under attack, against eps."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    right = max([0.3, *(float(e) for curve in attacked.values() for e in curve)])
    for (name, radius), colour in zip(radii.items(), cycle(COLOURS.values()), strict=False):
        grid = [right * k / 300 for k in range(301)]
        axis.plot(
            grid, [100 * float((radius > e).double().mean()) for e in grid], color=colour, label=f"{name}, certified"
        )
        points = sorted((float(e), 100 * a) for e, a in attacked[name].items())
        axis.plot(*zip(*points, strict=True), "--o", ms=4, color=colour, label=f"{name}, after PGD")
    axis.set(xlabel="l2 norm of the perturbation", ylabel="accuracy, %", xlim=(0, right), ylim=(0, 100))
    axis.legend(fontsize=8)
    return _svg(figure)


def bench_networks(path: Path, cases: list[dict[str, Any]]) -> Path:
    """Draw the time of a training step relative to the plain network, a bar for each method, with the paper's times."""
    figure = Figure(figsize=(11, 1.2 + 2.6 * len(cases)), layout="constrained")
    for axis, case in zip(figure.subplots(len(cases), 1, squeeze=False)[:, 0], cases, strict=True):
        ratios = _ratios(case)
        names = list(ratios)
        colours = [COLOURS.get(name, "0.6") for name in names]
        bars = axis.bar(range(len(names)), list(ratios.values()), 0.7, color=colours)
        axis.bar_label(bars, [f"{v:.2f}" for v in ratios.values()], fontsize=8)
        paper = case["paper"]
        if "plain" in paper:
            known = [(k, paper[n] / paper["plain"]) for k, n in enumerate(names) if n in paper]
            axis.plot(*zip(*known, strict=True), "k_", ms=28, label="the paper, on a GPU")
            axis.legend(fontsize=8, markerscale=0.5)
        axis.axhline(1, color="0.3", lw=0.8, ls=":")
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set(title=f"{case['network']}, width {case['width']}, batch {case['batch']}", ylabel="x plain")
        axis.margins(y=0.15)
    figure.suptitle("time of a training step")
    figure.savefig(path, dpi=110)
    return path


def bench_layers(path: Path, cases: list[dict[str, Any]]) -> Path:
    """Draw milliseconds of a training step of one layer, a panel for each quantity that varies."""
    panels = list(dict.fromkeys(case["panel"] for case in cases))
    figure = Figure(figsize=(13, 1 + 3.4 * -(-len(panels) // 3)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 3), 3, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        some = [case for case in cases if case["panel"] == panel]
        varies = next(key for key in ("n", "c", "k", "o") if len({case[key] for case in some}) > 1 or len(some) == 1)
        for name in some[0]["figures"]:
            values = [1e3 * statistics.median(case["figures"][name]["train"]) for case in some]
            strong = name in COLOURS
            axis.plot(
                [case[varies] for case in some], values, marker="o", ms=3.5, lw=2 if strong else 1, label=name,
                color=COLOURS.get(name), ls="-" if strong else "--",
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks([case[varies] for case in some], [str(case[varies]) for case in some])
        axis.set(title=f"({panel}) {some[0]['title']}", ylabel="ms, forward + backward")
    for axis in axes[len(panels) :]:
        axis.axis("off")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    return path


def experiment(about: "Experiment", table: "Table") -> str:
    """Return an SVG with a panel for each figure: lines over the sweep, if there is one, or else dots by column."""
    rows = about.rows
    figure = Figure(figsize=(11, 0.4 + 2.3 * -(-len(rows) // 2)), layout="constrained")
    axes = figure.subplots(-(-len(rows) // 2), 2, squeeze=False).flatten()
    for axis in axes[len(rows) :]:
        axis.axis("off")
    for axis, row in zip(axes, rows, strict=False):
        if about.sweep is None:
            _dots(axis, [table.cells[row.key, column] for column in table.columns], table.columns)
        else:
            _lines(axis, table, row.key, about.sweep["name"])
        axis.set_title(row.label, fontsize=9)
    return _svg(figure)


def ratios(layers: dict[str, dict[str, list[float]]]) -> str:
    """Return an SVG with histograms of |Conv(x)| / |x| before and after training, a panel for each layer."""
    figure = Figure(figsize=(11, 2.4), layout="constrained")
    for axis, (name, values) in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers.items(), strict=True):
        low, high = (f(v for some in values.values() for v in some) for f in (min, max))
        bins = [low + (high - low) * k / 20 for k in range(21)] if high > low else 1
        for (when, some), colour in zip(values.items(), COLOURS.values(), strict=False):
            axis.hist(some, bins, alpha=0.6, color=colour, label=when)
        axis.set_title(name, fontsize=9)
        axis.ticklabel_format(axis="x", useOffset=True)
        axis.tick_params(labelsize=6)
        axis.xaxis.get_offset_text().set_fontsize(6)
        axis.locator_params(axis="x", nbins=3)
        axis.set_yticks([])
    axis.legend(fontsize=7)
    return _svg(figure)


def trade_off(table: "Table", x: "Row", y: "Row") -> str:
    """Return an SVG with a dot for each column that has both figures; the first words of columns have a colour each."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis, kinds = figure.subplots(), sorted({column.partition(" ")[0] for column in table.columns})
    for column in table.columns:
        kind, _, label = column.partition(" ")
        points = [table.cells[row.key, column].ours for row in (x, y)]
        if all(points):
            at = (statistics.fmean(points[0]), statistics.fmean(points[1]))
            known = axis.get_legend_handles_labels()[1]
            axis.plot(*at, "o", ms=6, color=f"C{kinds.index(kind)}", label=None if kind in known else kind)
            axis.annotate(label or kind, at, xytext=(5, 3), textcoords="offset points", fontsize=8)
    axis.set(xlabel=x.label, ylabel=y.label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    return _svg(figure)


def _dots(axis: Any, cells: "list[Cell]", names: list[str]) -> None:
    """Draw our figures as dots with deviations, the paper's as strokes."""
    for k, cell in enumerate(cells):
        if cell.ours:
            spread = statistics.stdev(cell.ours) if len(cell.ours) > 1 else 0
            axis.errorbar(k, statistics.fmean(cell.ours), spread, fmt="o", ms=6, capsize=4, color=COLOURS["cayley"])
        if cell.paper:
            axis.plot(k, cell.paper[0], "_", ms=22, color=COLOURS["plain"], mew=2)
    axis.margins(y=0.15)
    axis.set_xticks(range(len(names)), names, fontsize=7, rotation=20 if max(map(len, names)) > 9 else 0)
    axis.tick_params(axis="y", labelsize=7)


def _lines(axis: Any, table: "Table", key: str, name: str) -> None:
    """Draw our figures as lines over the sweep, the paper's as crosses of the same colour."""
    points = [(float(row.key.split(" ", 1)[0]), row.key) for row in table.rows if row.key.split(" ", 1)[1] == key]
    for k, column in enumerate(table.columns):
        for values, style in (("ours", "-o"), ("paper", "x")):
            cells = [(x, getattr(table.cells[row, column], values)) for x, row in points]
            known = [(x, v[0] if values == "paper" else statistics.fmean(v)) for x, v in cells if v]
            if known:
                label = column if values == "ours" else None
                axis.plot(*zip(*known, strict=True), style, ms=4, color=f"C{k}", label=label)
    axis.set_xlabel(name, fontsize=8)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=6)
    axis.tick_params(labelsize=7)


def _ratios(case: dict[str, Any]) -> dict[str, float]:
    medians = {name: statistics.median(f["train"]) for name, f in case["figures"].items()}
    return {name: median / medians["plain"] for name, median in medians.items()}


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
