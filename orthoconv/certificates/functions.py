"""Functions of torch as modules that compute the same, so that the rules for modules hold for them."""

__all__ = ["as_module"]

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.nn.normalize import Scale
from orthoconv.nn.pooling import ScaledMean
from orthoconv.nn.reflection import Abs

Make = Callable[..., nn.Module | None]  # from the input and the other arguments, by name
_MISSING = object()


def as_module(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> nn.Module | None:
    """Return a module whose value for ``args[0]`` is that of the function; None where no module is known.

    Arguments:
        target: A function, or the name of a method of a tensor.
        args: Its arguments; the first one is the input, a tensor.
        kwargs: Its other arguments.

    >>> as_module(F.max_pool2d, (torch.zeros(1, 1, 4, 4), 2), {"padding": 1})
    MaxPool2d(kernel_size=2, stride=2, padding=1, dilation=1, ceil_mode=False)
    """
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    names, make = _FORMS.get(target, ((), None)) if _is_hashable(target) else ((), None)
    if make is None or not args or not isinstance(args[0], Tensor) or len(args) - 1 > len(names):
        return None
    given = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    if given.pop("inplace", False) or not given.keys() <= set(names):
        return None
    try:
        return make(args[0], **given)
    except (TypeError, ValueError, RuntimeError):  # arguments of another kind
        return None


def _is_hashable(target: Any) -> bool:
    return getattr(target, "__hash__", None) is not None


def _plain(kind: type[nn.Module], *names: str) -> tuple[tuple[str, ...], Make]:
    """A module whose arguments have the names of the function's."""
    return names, lambda x, **given: kind(**given)


def _pool(kind: Any, *names: str, ndim: int = 4) -> tuple[tuple[str, ...], Make]:
    def make(x: Tensor, **given: Any) -> nn.Module | None:
        given["stride"] = given.get("stride") or given["kernel_size"]
        return kind(**given) if x.ndim == ndim else None

    return ("kernel_size", "stride", *names), make


def _on_images(kind: Any, *names: str, ndim: int = 4) -> tuple[tuple[str, ...], Make]:
    return names, lambda x, **given: kind(**given) if x.ndim == ndim else None


def _filled(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Give a module, made on the meta device, tensors of its own."""
    for name, value in tensors.items():
        own = getattr(module, name, None)
        as_parameter = name in ("weight", "bias") and value is not None and not isinstance(value, nn.Parameter)
        stands = nn.Parameter(value, requires_grad=False) if as_parameter and value is not None else value
        if own is not None or value is not None:
            setattr(module, name, stands)
    return module.eval()


def _conv(kind: Any) -> Make:
    def make(x: Tensor, weight: Tensor, bias: Tensor | None = None, **given: Any) -> nn.Module | None:
        if not isinstance(weight, Tensor) or x.ndim != weight.ndim:
            return None
        groups = given.get("groups", 1)
        transposed = kind in (nn.ConvTranspose1d, nn.ConvTranspose2d)
        i, o = x.shape[1], weight.shape[1] * groups if transposed else len(weight)
        module = kind(i, o, tuple(weight.shape[2:]), bias=bias is not None, device="meta", **given)
        return _filled(module, weight=weight, bias=bias)

    return make


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    return _filled(nn.Linear(weight.shape[1], len(weight), bias is not None, device="meta"), weight=weight, bias=bias)


def _batch_norm(
    x: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> nn.Module | None:  # fmt: skip
    kind: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}.get(x.ndim)
    if kind is None or training or running_mean is None or (weight is None) != (bias is None):
        return None
    module = kind(x.shape[1], eps, momentum, affine=weight is not None, device="meta")
    module.num_batches_tracked = torch.zeros((), dtype=torch.long)
    return _filled(module, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)


def _group_norm(
    x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> nn.Module | None:
    module = nn.GroupNorm(num_groups, x.shape[1], eps, affine=weight is not None, device="meta")
    return _filled(module, weight=weight, bias=bias)


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> nn.Module | None:
    module = nn.LayerNorm(list(normalized_shape), eps, elementwise_affine=weight is not None, device="meta")
    return _filled(module, weight=weight, bias=bias)


def _instance_norm(x: Tensor, weight: Any = None, bias: Any = None, **given: Any) -> nn.Module | None:
    if given.get("running_mean") is not None or x.ndim != 4:
        return None
    module = nn.InstanceNorm2d(x.shape[1], affine=weight is not None, device="meta")
    return _filled(module, weight=weight, bias=bias)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True) -> nn.Module | None:
    return None if training else nn.Identity()


def _padding(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> nn.Module | None:
    while len(pad) > 4 and tuple(pad[-2:]) == (0, 0):  # an axis that is not padded, such as that of the batch
        pad = pad[:-2]
    if x.ndim != 4 or len(pad) not in (2, 4, 6) or not all(isinstance(n, int) for n in pad):
        return None
    sides: Any = (*pad, *[0] * (4 - len(pad)))
    if mode == "constant" and len(pad) == 6:  # of the channels, too
        return nn.ConstantPad3d(sides, value or 0.0)
    if mode == "constant":
        return nn.ConstantPad2d(sides, value or 0.0)
    kinds: dict[str, Any] = {"reflect": nn.ReflectionPad2d, "replicate": nn.ReplicationPad2d,
                             "circular": nn.CircularPad2d}  # fmt: skip
    return kinds[mode](sides) if mode in kinds else None


def _interpolate(x: Tensor, antialias: bool = False, **given: Any) -> nn.Module | None:
    return None if antialias else nn.Upsample(**given)


def _mean(x: Tensor, dim: Any, keepdim: bool = False, dtype: Any = None) -> nn.Module | None:
    axes = [dim] if isinstance(dim, int) else list(dim)
    if dtype is not None or any(d % x.ndim == 0 for d in axes):
        return None
    return nn.Sequential(ScaledMean(axes, keepdim), Scale(1 / math.sqrt(math.prod(x.shape[d] for d in axes))))


def _softmax(x: Tensor, dim: int, _stacklevel: int = 3, dtype: Any = None) -> nn.Module | None:
    return nn.Softmax(dim) if dtype is None else None


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> nn.Module | None:  # noqa: A002
    if isinstance(min, int | float) and isinstance(max, int | float) and min < max:
        return nn.Hardtanh(float(min), float(max))
    return nn.ReLU() if min == 0 and max is None else None


def _prelu(x: Tensor, weight: Tensor) -> nn.Module:
    return _filled(nn.PReLU(weight.numel(), device="meta"), weight=weight)


_POOLS = ("padding", "ceil_mode", "count_include_pad", "divisor_override")
_MAXIMA = ("padding", "dilation", "ceil_mode", "return_indices")
_TRANSPOSED = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_CONV = ("weight", "bias", "stride", "padding", "dilation", "groups")
_BN = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_SIZES = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
_IN = ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_FORMS: dict[Any, tuple[tuple[str, ...], Make]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), _plain(nn.ReLU, "inplace")),
    F.relu6: _plain(nn.ReLU6, "inplace"),
    F.leaky_relu: _plain(nn.LeakyReLU, "negative_slope", "inplace"),
    F.elu: _plain(nn.ELU, "alpha", "inplace"),
    F.selu: _plain(nn.SELU, "inplace"),
    F.celu: _plain(nn.CELU, "alpha", "inplace"),
    F.gelu: _plain(nn.GELU, "approximate"),
    F.silu: _plain(nn.SiLU, "inplace"),
    F.mish: _plain(nn.Mish, "inplace"),
    F.hardswish: _plain(nn.Hardswish, "inplace"),
    F.hardsigmoid: _plain(nn.Hardsigmoid, "inplace"),
    F.hardtanh: _plain(nn.Hardtanh, "min_val", "max_val", "inplace"),
    F.softplus: _plain(nn.Softplus, "beta", "threshold"),
    F.softsign: _plain(nn.Softsign),
    F.logsigmoid: _plain(nn.LogSigmoid),
    **dict.fromkeys((torch.prelu, F.prelu), (("weight",), _prelu)),
    **dict.fromkeys((torch.sigmoid, "sigmoid"), _plain(nn.Sigmoid)),
    **dict.fromkeys((torch.tanh, "tanh"), _plain(nn.Tanh)),
    **dict.fromkeys((torch.abs, "abs"), _plain(Abs)),
    **dict.fromkeys((torch.clamp, "clamp"), (("min", "max"), _clamp)),
    F.softmax: (("dim", "_stacklevel", "dtype"), _softmax),
    **dict.fromkeys((torch.softmax, "softmax"), (("dim", "dtype"), _softmax)),
    F.max_pool2d: _pool(nn.MaxPool2d, *_MAXIMA),
    F.max_pool1d: _pool(nn.MaxPool1d, *_MAXIMA, ndim=3),
    F.max_pool3d: _pool(nn.MaxPool3d, *_MAXIMA, ndim=5),
    F.avg_pool1d: _pool(nn.AvgPool1d, *_POOLS[:3], ndim=3),
    F.avg_pool3d: _pool(nn.AvgPool3d, *_POOLS, ndim=5),
    F.adaptive_avg_pool1d: _on_images(nn.AdaptiveAvgPool1d, "output_size", ndim=3),
    F.adaptive_avg_pool3d: _on_images(nn.AdaptiveAvgPool3d, "output_size", ndim=5),
    F.avg_pool2d: _pool(nn.AvgPool2d, *_POOLS),
    F.adaptive_avg_pool2d: _on_images(nn.AdaptiveAvgPool2d, "output_size"),
    F.adaptive_max_pool2d: _on_images(nn.AdaptiveMaxPool2d, "output_size", "return_indices"),
    **dict.fromkeys((F.pixel_shuffle, torch.pixel_shuffle), _on_images(nn.PixelShuffle, "upscale_factor")),
    **dict.fromkeys((F.pixel_unshuffle, torch.pixel_unshuffle), _on_images(nn.PixelUnshuffle, "downscale_factor")),
    torch.channel_shuffle: _on_images(nn.ChannelShuffle, "groups"),
    **dict.fromkeys((torch.mean, "mean"), (("dim", "keepdim", "dtype"), _mean)),
    **dict.fromkeys((F.dropout, F.dropout2d), (("p", "training"), _dropout)),
    F.pad: (("pad", "mode", "value"), _padding),
    F.interpolate: (_SIZES, _interpolate),
    F.conv2d: (_CONV, _conv(nn.Conv2d)),
    F.conv1d: (_CONV, _conv(nn.Conv1d)),
    F.conv3d: (_CONV, _conv(nn.Conv3d)),
    F.conv_transpose1d: (_TRANSPOSED, _conv(nn.ConvTranspose1d)),
    F.conv_transpose2d: (_TRANSPOSED, _conv(nn.ConvTranspose2d)),
    F.linear: (("weight", "bias"), _linear),
    F.batch_norm: (_BN, _batch_norm),
    F.group_norm: (("num_groups", "weight", "bias", "eps"), _group_norm),
    F.layer_norm: (("normalized_shape", "weight", "bias", "eps"), _layer_norm),
    F.instance_norm: (_IN, _instance_norm),
    F.local_response_norm: _plain(nn.LocalResponseNorm, "size", "alpha", "beta", "k"),
}  # fmt: skip
