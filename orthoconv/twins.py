"""A model as plain modules twice: in float32, and in float64 with the same operators."""

__all__ = ["Twins", "export_in_double"]

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from orthoconv.certificates.double import keep_parametrized, require_all_double
from orthoconv.exporting import export
from orthoconv.modules import leaf_inputs, zeros_for
from orthoconv.nn.arguments import Pair, pair
from orthoconv.nn.convolution import BaseConv2d
from orthoconv.nn.plain import PlainBlocks, PlainConv2d, PlainSpectrum


def export_in_double(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """Copy a model as `export` does, to compute in float64 with the operators of the model's own precision.

    It evaluates the function of `in_double` in real arithmetic. A Fourier transform gets tables of cosines in float64.
    The entries of an operator are those of the model, which float64 holds exactly.

    >>> from orthoconv import in_double
    >>> from orthoconv.nn import CayleyConv2d
    >>> model, x = CayleyConv2d(2, 4, 3).eval(), torch.rand(2, 2, 6, 6).double()
    >>> torch.dist(export_in_double(model, (2, 6, 6))(x), in_double(model)(x)).item() < 1e-13
    True
    """
    fixed = copy.deepcopy(model)
    for module in list(fixed.modules()):
        keep_parametrized(module)
    plain = export(fixed.eval(), input_shape)
    forms = dict(plain.named_modules(remove_duplicate=False))
    for name, layer, x in leaf_inputs(fixed, zeros_for(fixed, input_shape)):
        if isinstance(layer, BaseConv2d) and name in forms:
            _use_doubles(layer, forms[name], (x.shape[-2], x.shape[-1]))
    return plain.double()


def _use_doubles(layer: BaseConv2d, plain: nn.Module, size: Pair) -> None:
    """Give the plain form of a convolution its spectrum in float64; some methods compute it from float32 factors."""
    has_spectrum = isinstance(plain, PlainConv2d) and isinstance(plain.inner, PlainSpectrum)
    if has_spectrum or isinstance(plain, PlainBlocks):
        D = layer.spectrum(size, double=True).detach()  # (g, f, o, i)
        if isinstance(plain, PlainBlocks):
            plain.weight = D[:, 0].real.flatten(0, 1)  # the same at all frequencies
        else:
            plain.inner = PlainSpectrum(D.mH if layer.transposed else D, layer.geometry.inner_size(size))


class Twins(nn.Module):
    """Logits in float32, and in float64 by the same operators, of one batch of images in float32.

    In float64 convolutions and averages are written as products with matrices and as sums, since runtimes of ONNX have
    no others in that precision.

    Arguments:
        model: Any model that `export` takes.
        input_shape: Shape of one input, without the batch.
    """

    def __init__(self, model: nn.Module, input_shape: Sequence[int]) -> None:
        super().__init__()
        self.single, self.double_ = export(model, input_shape), export_in_double(model, input_shape)
        with torch.no_grad():
            require_all_double(self.double_, zeros_for(model, input_shape))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.single(images)
        with _ByProducts():
            return logits, self.double_(images.double())


class _ByProducts(TorchFunctionMode):
    """Inside this context, convolutions and average pools are products and sums, and numbers in float64 stay so."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").strip("_") in _ARITHMETIC:
            args = _in_double(args)
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _in_double(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make tensors of the numbers that a float64 tensor meets: torch's exporter would round them to float32."""
    if not any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in args):
        return args
    return tuple(torch.tensor(one, dtype=torch.float64) if isinstance(one, float) else one for one in args)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.nn.functional.conv2d` of x (b, i, h, w), as one product with the matrix (o, taps i) of the kernel."""
    taps, steps, gaps = weight.shape[2:], pair("stride", stride), pair("dilation", dilation)
    spans = [d * (k - 1) for k, d in zip(taps, gaps, strict=True)]
    if isinstance(padding, str):
        before = [n // 2 if padding == "same" else 0 for n in spans]
        after = [n - n // 2 if padding == "same" else 0 for n in spans]
    else:
        before = after = [padding] * 2 if isinstance(padding, int) else list(padding)
    if any(before) or any(after):
        x = F.pad(x, (before[1], after[1], before[0], after[0]))
    windows = torch.stack(_windows(x, taps, steps, gaps), 2)  # (b, i, taps, h, w)
    size, o = windows.shape[3:], weight.shape[0]
    columns = windows.flatten(3).unflatten(1, (groups, -1)).flatten(2, 3)  # (b, g, i taps, h w)
    y: Tensor = weight.flatten(1).unflatten(0, (groups, o // groups)) @ columns  # (b, g, o, h w)
    y = y.flatten(1, 2).unflatten(2, size)
    return y if bias is None else y + bias[:, None, None]


def _average(
    input: Tensor,  # noqa: A002
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """`torch.nn.functional.avg_pool2d`, as a sum if there is no padding and every window is whole."""
    taps = pair("kernel_size", kernel_size)
    if padding not in (0, (0, 0)) or ceil_mode:
        return F.avg_pool2d(input, taps, stride, padding, ceil_mode, count_include_pad, divisor_override)
    windows = _windows(input, taps, pair("stride", stride or kernel_size), (1, 1))
    total = windows[0]
    for window in windows[1:]:
        total = total + window
    return total / (divisor_override or len(windows))


def _windows(x: Tensor, taps: Sequence[int], steps: Sequence[int], gaps: Sequence[int]) -> list[Tensor]:
    """Return what each tap of a kernel reads from x (..., h, w)."""
    h, w = ((n - d * (k - 1) - 1) // s * s + 1 for n, k, s, d in zip(x.shape[-2:], taps, steps, gaps, strict=True))
    starts = [(p * gaps[0], q * gaps[1]) for p in range(taps[0]) for q in range(taps[1])]
    return [x[..., a : a + h : steps[0], b : b + w : steps[1]] for a, b in starts]


_ARITHMETIC = {"add", "radd", "iadd", "sub", "rsub", "isub", "subtract", "mul", "rmul", "imul", "multiply"}
_ARITHMETIC |= {"div", "rdiv", "idiv", "divide", "truediv", "rtruediv", "itruediv", "true_divide"}
_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.conv2d: _convolution,
    F.conv2d: _convolution,
    F.avg_pool2d: _average,
}
