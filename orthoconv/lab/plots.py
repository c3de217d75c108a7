"""Pictures, each a function of the numbers it shows."""

__all__ = ["certified_curves", "plot_demo", "training_curves"]

import io
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

COLOURS = {"cayley": "#1f5fbf", "plain": "#c8553d"}


def plot_demo(
    path: Path, before: dict[str, Tensor], after: dict[str, Tensor], ratios: dict[str, Tensor], images: list[Tensor]
) -> Path:
    """Singular values before and after training, norm ratios, and an image with its convolution and inverse."""
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
    """Loss, and accuracy on training and test images, by epoch: an SVG."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = [m["epoch"] for m in metrics]
    loss.plot(epochs, [m["loss"] for m in metrics], color=COLOURS["cayley"])
    loss.set(title="training loss", xlabel="epoch")
    accuracy.plot(epochs, [100 * m["accuracy"] for m in metrics], color="0.6", label="training")
    accuracy.plot(epochs, [100 * m["test_accuracy"] for m in metrics], color=COLOURS["cayley"], label="test")
    for name, style in zip(
        metrics[0]["certified"] if metrics else [], cycle(("--", ":", "-.", (0, (1, 4)))), strict=False
    ):
        values = [100 * m["certified"][name] for m in metrics]
        accuracy.plot(epochs, values, color=COLOURS["plain"], ls=style, label=f"certified {name}")
    accuracy.set(title="accuracy, %", xlabel="epoch", ylim=(0, 100))
    accuracy.legend(fontsize=7)
    return _svg(figure)


def certified_curves(radii: dict[str, Tensor], attacked: dict[str, dict[str, float]]) -> str:
    """Fraction of images with a certified radius above eps, and what an attack leaves, against eps: an SVG."""
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


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
