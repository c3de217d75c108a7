"""LipConvNet (Singla and Feizi, Skew orthogonal convolutions, 2021), the network of SOC, LOT and BRO."""

__all__ = ["lipconvnet"]

from orthoconv.models.factory import width_of

BLOCKS = 5
_CHANNELS = 32


def lipconvnet(width: float, kernel_size: int, depth: int | None = None) -> list[str]:
    """Five blocks of convolutions, each of which ends with half the image and twice the channels, and a linear layer.

    There are `depth` convolutions, 5 by default, and MaxMin after each. The last one of a block has all its taps on the
    smaller image. The fifth block has kernels of one tap.
    """
    depth = BLOCKS if depth is None else depth
    if depth % BLOCKS:
        raise ValueError(f"depth must be a multiple of {BLOCKS} for lipconvnet, got {depth!r}")
    words: list[str] = []
    for block in range(BLOCKS):
        c, k = width_of(_CHANNELS * 2**block, width), kernel_size if block < BLOCKS - 1 else 1
        words += [f"conv {c} k{k}", "maxmin"] * (depth // BLOCKS - 1)
        words += ["downsample 2", f"conv {2 * c} k{k}", "maxmin"]
    return [*words, "flatten", "head"]
