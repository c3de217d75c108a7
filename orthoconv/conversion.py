"""Make an existing network 1-Lipschitz, layer by layer."""

__all__ = ["ConversionError", "convert"]

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from orthoconv.certificates.bounds import lipschitz_bound
from orthoconv.certificates.graphs import SHAPE_ONLY
from orthoconv.modules import zeros_for
from orthoconv.nn import (
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
    ChannelShuffle,
    ConvexSum,
    MaxMin,
    ScaledAdaptiveAvgPool2d,
    ScaledAvgPool2d,
)
from orthoconv.nn.arguments import pair

_ADD = {torch.add, operator.add, operator.iadd, "add", "add_"}
_RELU = {F.relu, torch.relu, torch.relu_, F.leaky_relu, F.elu, F.gelu, F.silu, "relu", "relu_"}
_NUMBERS = {"size", "dim", getattr, operator.getitem, operator.floordiv, operator.mul}
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish)
_KEPT = (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.Tanh)
_BY_SHAPE = (*_ACTIVATIONS, nn.AdaptiveAvgPool2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class ConversionError(ValueError):
    """A network that cannot be made 1-Lipschitz by the rules; the message lists every reason.

    >>> from torch import nn
    >>> convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Softmax2d()), (3, 8, 8))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    orthoconv.conversion.ConversionError: ...
    """


def convert(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """A copy of `model` whose layers are orthogonal or 1-Lipschitz, so that `lipschitz_bound` is at most 1 for it.

    Its weights are new, and it is to be trained; its graph is the old one, with

    - Conv2d, ConvTranspose2d, Linear as `CayleyConv2d`, `CayleyConvTranspose2d`, `CayleyLinear` of the same arguments,
      padded by zeros or circularly as they were;
    - ReLU and its like as `MaxMin`, or as ReLU where the number of channels is odd;
    - batch norms left out;
    - averages over windows that do not overlap as `ScaledAvgPool2d`, adaptive ones as `ScaledAdaptiveAvgPool2d`; maxima
      over windows that do overlap as maxima over windows that do not;
    - ChannelShuffle as ours;
    - additions of two branches as `ConvexSum`.

    Arguments:
        model: A network that torch.fx can trace.
        input_shape: Shape of one input, without the batch.

    Raises:
        ConversionError: If a part has no rule; the message lists all such parts.

    >>> from orthoconv import lipschitz_bound
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2))
    >>> lipschitz_bound(convert(model, (3, 8, 8)), (3, 8, 8)) < 1 + 1e-5
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a module of torch, got {model!r}")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = zeros_for(model, input_shape).repeat(2, *[1] * len(input_shape))
    traced, before = _trace(model, x)
    problems: list[str] = []
    made: dict[int, nn.Module] = {}
    for node in list(traced.graph.nodes):
        try:
            _convert_node(traced, node, made)
        except ValueError as error:
            problems.append(f"  {node.name} ({_what(traced, node)}): {error}")
    if problems:
        raise ConversionError("these parts cannot be made 1-Lipschitz by a rule:\n" + "\n".join(problems))
    traced.graph.lint()
    traced.delete_all_unused_submodules()
    traced.recompile()
    traced = traced.to(like.device, like.dtype).eval()
    _check(traced, x, before)
    return traced.train(model.training)


def _trace(model: nn.Module, x: Tensor) -> tuple[fx.GraphModule, dict[str, torch.Size]]:
    """Return the graph of a copy of the model in eval mode, and the shapes of its values for the inputs x."""
    name, shape = type(model).__name__, tuple(x.shape[1:])
    if scripted := [k or name for k, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
        raise ConversionError(f"{scripted[0]} is a scripted module; convert the module that it was made from")
    twin = copy.deepcopy(model).eval()
    try:
        with torch.no_grad():
            y = twin(x.clone())
    except Exception as error:  # whatever the model raises
        raise ConversionError(f"{name} does not take inputs of shape {shape}: {error}") from error
    if not isinstance(y, Tensor):
        raise ConversionError(f"{name} must return one tensor, got {type(y).__name__}")
    try:
        traced = fx.GraphModule(twin, _Tracer().trace(model))
        return traced, _shapes(traced, x)
    except (fx.proxy.TraceError, TypeError, RuntimeError, NameError) as error:
        made = "; a module that forward itself makes must be made in __init__" if isinstance(error, NameError) else ""
        raise ConversionError(f"{name} cannot be traced for inputs of {shape}: {error}{made}") from error


def _shapes(traced: fx.GraphModule, x: Tensor) -> dict[str, torch.Size]:
    """Shape of each value of a graph that is a tensor."""
    with torch.no_grad():
        ShapeProp(traced).propagate(x)
    metas = {node.name: node.meta.get("tensor_meta") for node in traced.graph.nodes}
    return {name: meta.shape for name, meta in metas.items() if hasattr(meta, "shape")}


def _check(traced: fx.GraphModule, x: Tensor, before: dict[str, torch.Size]) -> None:
    """The new network runs, with the shapes of the old one, and its bound is 1."""
    try:
        after = _shapes(traced, x)
    except RuntimeError as error:
        raise ConversionError(f"the new network does not take what the old one did: {error}") from error
    if changed := [
        f"  {name}: {tuple(before[name])}, now {tuple(s)}" for name, s in after.items() if before[name] != s
    ]:
        raise ConversionError("these values would have other shapes:\n" + "\n".join(changed))
    bound = lipschitz_bound(traced, x.shape[1:])
    if bound > 1 + 1e-3:
        raise ConversionError(f"the bound is {bound:.4g}: layers of orthoconv.nn are kept as they are, and some expand")


class _Tracer(fx.Tracer):
    """Goes into everything but layers of torch and of this library."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("orthoconv.nn") or super().is_leaf_module(m, module_qualified_name)


def _what(traced: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(traced.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


def _shape(node: Any) -> torch.Size:
    """Shape of the value of a node, batch included."""
    found = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    if found is None:
        raise ValueError("its input is not a tensor that could be followed")
    shape: torch.Size = found.shape
    return shape


def _convert_node(traced: fx.GraphModule, node: fx.Node, made: dict[int, nn.Module]) -> None:
    if node.op == "call_module":
        old = traced.get_submodule(str(node.target))
        if isinstance(old, _BY_SHAPE):  # which may be another module in another place
            _call(traced, node, _convert_module(old, _shape(node.args[0])), node.args[:1])
        else:
            if id(old) not in made:
                made[id(old)] = new = _convert_module(old, _shape(node.args[0]))
                made[id(new)] = new  # where it stands already
            _set(traced, str(node.target), made[id(old)])
    elif node.op in ("call_function", "call_method"):
        _convert_call(traced, node)
    elif node.op == "get_attr":
        raise ValueError("a tensor of the network is used outside a layer")


def _convert_module(m: nn.Module, shape: torch.Size) -> nn.Module:
    """The 1-Lipschitz module in place of `m`, for inputs of that shape."""
    if isinstance(m, nn.Dropout | nn.Dropout2d):
        return type(m)(m.p)  # not in place
    if type(m).__module__.startswith("orthoconv.nn") or isinstance(m, _KEPT):
        return m
    if isinstance(m, nn.Conv2d):
        options: Any = {"stride": m.stride, "padding": m.padding, "dilation": m.dilation, "groups": m.groups}
        bias, mode = m.bias is not None, m.padding_mode
        return CayleyConv2d(m.in_channels, m.out_channels, m.kernel_size, **options, bias=bias, padding_mode=mode)
    if isinstance(m, nn.ConvTranspose2d):
        padding: Any = m.padding  # torch has it by zeros alone
        return CayleyConvTranspose2d(
            m.in_channels, m.out_channels, m.kernel_size, m.stride, padding, m.output_padding, m.groups,
            m.bias is not None, m.dilation, m.padding_mode,
        )  # fmt: skip
    if isinstance(m, nn.Linear):
        return CayleyLinear(m.in_features, m.out_features, m.bias is not None)
    if isinstance(m, _ACTIVATIONS):
        return _activation(shape)
    if isinstance(m, _NORMS):
        return nn.Identity()
    if isinstance(m, nn.ChannelShuffle):
        return ChannelShuffle(m.groups)
    if isinstance(m, nn.AvgPool2d):
        return _average(m.kernel_size, m.stride, m.padding)
    if isinstance(m, nn.MaxPool2d):
        if m.return_indices:
            raise ValueError("it returns indices beside its values (return_indices=True)")
        return _maximum(m.kernel_size, m.stride)
    if isinstance(m, nn.AdaptiveAvgPool2d):
        return _whole(m.output_size, shape)
    raise ValueError("there is no rule for it")


def _convert_call(traced: fx.GraphModule, node: fx.Node) -> None:
    """A call of a function or method: left as it is, or turned into a module."""
    target: Any = node.target
    if target in SHAPE_ONLY or (target in _NUMBERS and "tensor_meta" not in node.meta):
        return
    if target in _ADD:
        branches = [a for a in node.args if isinstance(a, fx.Node)]
        if len(branches) != 2 or node.kwargs:
            raise ValueError("it does not add two branches")
        if _shape(branches[0]) != _shape(branches[1]):
            raise ValueError(
                f"it adds branches of shapes {tuple(_shape(branches[0]))} and {tuple(_shape(branches[1]))}"
            )
        _call(traced, node, ConvexSum(), branches)
    elif target in _RELU:
        _call(traced, node, _activation(_shape(node.args[0])), node.args[:1])
    elif target in (F.avg_pool2d, F.max_pool2d):
        given = dict(zip(("kernel_size", "stride", "padding"), node.args[1:], strict=False)) | node.kwargs
        k, s = given["kernel_size"], given.get("stride") or given["kernel_size"]
        _call(
            traced,
            node,
            _average(k, s, given.get("padding", 0)) if target is F.avg_pool2d else _maximum(k, s),
            node.args[:1],
        )
    elif target is F.adaptive_avg_pool2d:
        size = node.args[1] if len(node.args) > 1 else node.kwargs["output_size"]
        _call(traced, node, _whole(size, _shape(node.args[0])), node.args[:1])
    elif target is F.dropout:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        _call(traced, node, nn.Dropout(float(p)), node.args[:1])  # type: ignore[arg-type]
    else:
        raise ValueError("there is no rule for it")


def _activation(shape: torch.Size) -> nn.Module:
    return MaxMin() if len(shape) != 3 and shape[1] % 2 == 0 else nn.ReLU()


def _average(k: Any, s: Any, padding: Any) -> nn.Module:
    if pair("kernel_size", k) != pair("stride", s) or padding not in (0, (0, 0)):
        raise ValueError(f"its windows of {k} with stride {s} and padding {padding} overlap or leave the image")
    return ScaledAvgPool2d(k)


def _maximum(k: Any, s: Any) -> nn.Module:
    stride = pair("stride", s)
    (kh, kw) = pair("kernel_size", k)
    if kh < stride[0] or kw < stride[1]:
        raise ValueError(f"its windows of {k} with stride {s} leave pixels out")
    return nn.MaxPool2d(stride)


def _whole(output_size: Any, shape: torch.Size) -> nn.Module:
    out = pair("output_size", output_size)
    if shape[-2] % out[0] or shape[-1] % out[1]:
        raise ValueError(f"its windows differ: {tuple(shape[-2:])} to {out}")
    return ScaledAdaptiveAvgPool2d(out)


def _call(traced: fx.GraphModule, node: fx.Node, module: nn.Module, args: Sequence[Any]) -> None:
    """Have `node` call `module` in place of a function."""
    name = f"converted_{node.name}"
    traced.add_submodule(name, module)
    node.op, node.target, node.args, node.kwargs = "call_module", name, tuple(args), {}


def _set(traced: fx.GraphModule, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(traced.get_submodule(parent), name, module)
