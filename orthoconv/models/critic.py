"""The critic of the Wasserstein experiment (Appendix D.2, after Li et al., 2019)."""

__all__ = ["critic"]

from orthoconv.models.factory import width_of


def critic(width: float, kernel_size: int) -> list[str]:
    """Four convolutions with stride 2 and MaxMin after each, and a linear layer."""
    words: list[str] = []
    for n in (64, 128, 256, 512):
        words += [f"conv {width_of(n, width)} k{kernel_size} s2", "maxmin"]
    return [*words, "flatten", "head"]
