"""A small LiResNet (Hu et al., Unlocking deterministic robustness certification on ImageNet, 2023)."""

__all__ = ["liresnet"]

from orthoconv.models.factory import option_names, width_of
from orthoconv.nn.methods import conv_method

DEPTH = 4  # convolutions of the body
_DENSE = 2


def liresnet(width: float, kernel_size: int, depth: int | None = None, conv: str = "lires") -> list[str]:
    """A stem with stride 2, `depth` convolutions at one width, a neck with stride 4, and linear layers.

    The convolutions are those of the method; a residual is inside them, if they are linear residuals. Those of the body
    are told their number, if the method `conv` has the option `depth`: LiRes divides its kernels by the root of it. The
    published networks have 12 of 512 channels and 8 linear layers of 2,048. In training, these also subtract the mean
    over the batch from what each kernel adds to the identity, and their necks are orthogonalised by Cholesky factors.
    """
    c, neck, dense = (width_of(n, width) for n in (64, 128, 512))
    count = DEPTH if depth is None else depth
    option = f" depth={count}" if "depth" in (option_names(conv_method(conv), 3) or ()) else ""
    body = [f"conv {c} k{kernel_size}{option}", "maxmin"] * count
    linear = [f"linear {dense}", "maxmin"] * _DENSE
    return [f"conv {c} k5 s2", "maxmin", *body, f"conv {neck} k4 s4", "maxmin", "flatten", *linear, "head"]
