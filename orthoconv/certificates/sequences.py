"""Rules for torch's modules of sequences, by those of images: a sequence is an image of one row."""

__all__ = ["Axes", "adaptive_maxima", "adaptive_means", "maxima", "means"]

from collections.abc import Callable
from typing import Any

from torch import nn

from orthoconv.certificates.rules import Figure, Shape, figures_of, register_rule
from orthoconv.nn.kernel import kernel_units

Axes = tuple[int | None, int | None]  # of a sequence or volume, which are the rows and columns of an image; or None


def maxima(m: Any, axes: Axes) -> nn.Module:
    """Return the maximum of images that a pool of sequences or volumes computes along two of its axes.

    >>> maxima(nn.MaxPool1d(3, 2), (None, 0))
    MaxPool2d(kernel_size=(1, 3), stride=(1, 2), padding=(0, 0), dilation=(1, 1), ceil_mode=False)
    """
    k, s, p, d = (_along(v, axes, n) for v, n in ((m.kernel_size, 1), (m.stride, 1), (m.padding, 0), (m.dilation, 1)))
    return nn.MaxPool2d(k, s, p, d, m.return_indices, m.ceil_mode)


def means(m: Any, axes: Axes) -> nn.Module:
    """Return the mean of images that a pool computes along two of its axes."""
    k, s, p = (_along(v, axes, n) for v, n in ((m.kernel_size, 1), (m.stride, 1), (m.padding, 0)))
    return nn.AvgPool2d(k, s, p, m.ceil_mode, m.count_include_pad)


def adaptive_maxima(m: Any, axes: Axes) -> nn.Module:
    """Return the adaptive maximum of images that a pool computes along two of its axes."""
    return nn.AdaptiveMaxPool2d(_along(m.output_size, axes, None), m.return_indices)


def adaptive_means(m: Any, axes: Axes) -> nn.Module:
    """Return the adaptive mean of images that a pool computes along two of its axes."""
    return nn.AdaptiveAvgPool2d(_along(m.output_size, axes, None))


def _along(value: Any, axes: Axes, neutral: int | None) -> Any:
    """What a pool has along each of two axes; for None, what does nothing."""
    return tuple(neutral if k is None else value[k] if isinstance(value, tuple | list) else value for k in axes)


def _row_convolution(kind: Any) -> Callable[[Any], nn.Module]:
    def make(m: Any) -> nn.Module:
        """Return the convolution of images of one row that has the weight of one of sequences."""
        padding: Any = m.padding if isinstance(m.padding, str) else (0, *m.padding)
        new: nn.Module = kind(
            m.in_channels, m.out_channels, (1, *m.kernel_size), (1, *m.stride), padding, dilation=(1, *m.dilation),
            groups=m.groups, bias=False, padding_mode=m.padding_mode, device="meta",
        )  # fmt: skip
        new.weight = nn.Parameter(m.weight.detach().unsqueeze(2), requires_grad=False)
        return new

    return make


def _on_rows(as_image: Callable[[Any], nn.Module], pick: int) -> Figure:
    """A figure of sequences: that of images of one row, by the rule of their module."""

    def figure(module: Any, shape: Shape) -> float:
        if len(shape) != 2:
            raise TypeError(
                f"{type(module).__name__} is bounded for sequences (c, n), got {module} for the shape {tuple(shape)}"
            )
        image = as_image(module)
        value: float = figures_of(image)[pick](image, (shape[0], 1, shape[1]))
        return value

    return figure


_POOLS: dict[type[nn.Module], Callable[[Any, Axes], nn.Module]] = {
    nn.MaxPool1d: maxima,
    nn.AvgPool1d: means,
    nn.AdaptiveMaxPool1d: adaptive_maxima,
    nn.AdaptiveAvgPool1d: adaptive_means,
}
for _kind, _pool in _POOLS.items():
    _make = (lambda pool: lambda m: pool(m, (None, 0)))(_pool)
    register_rule(_kind, lipschitz=_on_rows(_make, 0), rounding=_on_rows(_make, 1))
for _kind, _images in ((nn.Conv1d, nn.Conv2d), (nn.ConvTranspose1d, nn.ConvTranspose2d)):
    register_rule(
        _kind,
        lipschitz=_on_rows(_row_convolution(_images), 0),
        rounding=lambda m, shape: kernel_units(m.weight),
    )
