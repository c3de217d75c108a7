"""Pictures, each a function of the numbers it shows."""

__all__ = ["plot_demo"]

from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

COLOURS = {"Cayley": "#1f5fbf", "plain": "#c8553d"}


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
