"""The "large" network of Wong and Kolter (2018), as Li et al. (2019) and the paper use it (Section 5.1)."""

__all__ = ["kwlarge"]

from orthoconv.models.factory import width_of


def kwlarge(width: float, kernel_size: int, strided_kernel_size: int | None = None) -> list[str]:
    """Four convolutions, two of them with stride 2, and three linear layers, with MaxMin between them."""
    a, b, c = (width_of(n, width) for n in (32, 64, 512))
    k, s = kernel_size, strided_kernel_size or kernel_size
    return [
        f"conv {a} k{k}", "maxmin",
        f"conv {a} k{s} s2", "maxmin",
        f"conv {b} k{k}", "maxmin",
        f"conv {b} k{s} s2", "maxmin",
        "flatten",
        f"linear {c}", "maxmin",
        "linear 512", "maxmin",
        "head",
    ]  # fmt: skip
