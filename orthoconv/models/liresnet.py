"""A small LiResNet (Hu et al., Unlocking deterministic robustness certification on ImageNet, 2023)."""

__all__ = ["liresnet"]

from orthoconv.models.factory import width_of

DEPTH = 4  # convolutions of the body
_DENSE = 2


def liresnet(width: float, kernel_size: int, depth: int | None = None) -> list[str]:
    """A stem with stride 2, `depth` convolutions at one width, a neck with stride 4, and linear layers.

    The convolutions are those of the method; a residual is inside them, if they are linear residuals. The published
    networks have 12 of 512 channels and 8 linear layers of 2,048.
    """
    c, neck, dense = (width_of(n, width) for n in (64, 128, 512))
    body = [f"conv {c} k{kernel_size}", "maxmin"] * (DEPTH if depth is None else depth)
    linear = [f"linear {dense}", "maxmin"] * _DENSE
    return [f"conv {c} k5 s2", "maxmin", *body, f"conv {neck} k4 s4", "maxmin", "flatten", *linear, "head"]
