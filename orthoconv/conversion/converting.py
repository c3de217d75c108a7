"""Make an existing network 1-Lipschitz, part by part."""

__all__ = ["ConversionError", "convert"]

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from orthoconv.certificates.bounds import lipschitz_bound
from orthoconv.certificates.tracer import Traced, UntraceableError, trace
from orthoconv.certificates.unwrapping import unwrapped
from orthoconv.conversion.network import Network
from orthoconv.conversion.refusals import NO_RULE
from orthoconv.conversion.registry import Joined, rule_for
from orthoconv.conversion.weights import keep_weights as copy_weights
from orthoconv.conversion.weights import start_near_identity
from orthoconv.modules import require_module, zeros_for
from orthoconv.nn import CayleyConvTranspose2d, LOTConvTranspose2d
from orthoconv.nn.methods import conv_method, find_layer, linear_method

_SHALLOW = 20  # layers; random ones keep enough of the signal then, and learn faster (docs/conversion.md)
_UNTRACEABLE = (
    "Write this part so that no value of a tensor decides what is computed, of modules and functions of torch; or give "
    "its class a rule by orthoconv.register_conversion, which takes its place as a whole"
)

_UNBOUNDED = (
    "Select entries by slices such as x[:, :8] in place of lists and masks, and keep the examples of a batch apart; or "
    "put a module in its place that has a rule (orthoconv.conversion.conversion_rules lists them)"
)


class ConversionError(ValueError):
    """A network that cannot be made 1-Lipschitz by the rules; the message lists every reason.

    >>> convert(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Softmax2d()), (3, 8, 8))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    orthoconv.conversion.converting.ConversionError: ...
    """


def convert(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    conv: str | None = None,
    linear: str | None = None,
    keep_weights: bool = False,
) -> nn.Module:
    """A copy of `model` whose layers are orthogonal or 1-Lipschitz, so that `lipschitz_bound` is at most 1 for it.

    Its weights are new, unless they are to be kept, and it is to be trained. Its graph is that of the old one in eval
    mode, with

    - Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, Linear as orthogonal layers of the same arguments. In a
      network of more than 20 of them, Cayley's start near the identity. Where a stride does not divide the image, or a
      padding is not that of the same size, images are padded by zeros or cut;
    - ReLU and its like as `MaxMin`, or as ReLU where the number of channels is odd or no layer comes after it;
    - normalisations as `Shift`, which adds a learned number for each channel;
    - pools, resizing and padding divided by their norm; maxima over windows that overlap as maxima over windows that do
      not, and means with the norm 1;
    - sums of two branches as `ConvexSum`, which starts near the shorter branch; products with a gate likewise, and
      those with a learned scale as `Gain`;
    - `torch.cat` as `UnitCat`, unless it joins separate pieces of one value.

    The rules are data: `conversion_rules` lists them with a proof each, and `register_conversion` adds to them. The
    model is left as it is.

    Arguments:
        model: A network that returns one tensor, and that can be traced: no value of a tensor decides what is computed.
        input_shape: Shape of one input, without the batch.
        conv: Method of the convolutions, see `orthoconv.nn.conv_methods`; by default "cayley". Transposed ones are
            Cayley's.
        linear: Method of the linear layers; by default the one that goes with the convolutions.
        keep_weights: Whether to start from the weights of `model`, projected on the orthogonal ones. Layers are then
            `LOTConv2d` and `PolarLinear`, whose parameters are the old weights: a layer is the orthogonal one nearest
            to the old, by the polar factor at each frequency. `docs/conversion.md` says what strides leave out.

    Raises:
        ConversionError: If a part has no rule; the message lists all such parts, and what to do about each.

    >>> from orthoconv import lipschitz_bound
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2))
    >>> lipschitz_bound(convert(model, (3, 8, 8)), (3, 8, 8)) < 1 + 1e-5
    True
    """
    require_module(model)
    layers = _layers(conv, linear, keep_weights)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = zeros_for(model, input_shape)
    traced = _trace(unwrapped(model), x)
    network = Network(traced, layers)
    if not keep_weights and network.matrices > _SHALLOW:
        layers["keep"] = start_near_identity
    if problems := [f"  {node.name} ({network.what(node)}): {text}" for node, text in _convert_parts(network)]:
        raise ConversionError("these parts cannot be made 1-Lipschitz by a rule:\n" + "\n".join(problems))
    new = network.finish().to(like.device, like.dtype).eval()
    _check(new, x, traced.shapes)
    return new.train(model.training)


def _layers(conv: str | None, linear: str | None, keep: bool) -> dict[str, Any]:
    """What makes the new layers with weights."""
    if keep and (conv not in (None, "lot") or linear not in (None, "polar")):
        raise ValueError(
            f'keep_weights=True needs conv="lot" and linear="polar", which project the weights that they are given, '
            f"got {conv!r} and {linear!r}"
        )
    name = conv or ("lot" if keep else "cayley")
    made = {
        "conv": conv_method(name),
        "linear": linear_method(linear, name),
        "volumes": lambda *args, **options: find_layer(name, "conv3d")(*args, **options),  # few methods have one
    }
    if keep:
        return {**made, "transposed": LOTConvTranspose2d, "keep": copy_weights}
    return {**made, "transposed": CayleyConvTranspose2d}


def _convert_parts(network: Network) -> list[tuple[fx.Node, str]]:
    """Put a new part in the place of each; return the parts that have no rule, and what to do about them."""
    problems = []
    for node in network.parts():
        rule = rule_for(network.module(node) or node.target) or rule_for(network.as_module(node))
        try:
            if rule is None:
                raise ValueError(NO_RULE)
            made = rule.make(network.part(node))
            network.replace(node, made if isinstance(made, Joined) else Joined(made, ()))
        except (ValueError, TypeError) as error:
            problems.append((node, str(error).splitlines()[0]))
    return problems


def _trace(model: nn.Module, x: Tensor) -> Traced:
    """Return the graph of a copy of the model in eval mode."""
    name, shape = type(model).__name__, tuple(x.shape[1:])
    if scripted := [k or name for k, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
        raise ConversionError(f"{scripted[0]} is a scripted module; convert the module that it was made from")
    try:
        twin = copy.deepcopy(model).eval()
    except Exception as error:  # such as those of torch.nn.utils.weight_norm
        raise ConversionError(
            f"{name} cannot be copied; use torch.nn.utils.parametrizations, such as its weight_norm, for tensors that "
            f"are computed from parameters. The reason: {error}"
        ) from error
    try:
        with torch.no_grad():
            y = twin(x.repeat(2, *[1] * len(shape)))
    except Exception as error:  # whatever the model raises
        raise ConversionError(f"{name} does not take inputs of shape {shape}: {error}") from error
    if not isinstance(y, Tensor):
        raise ConversionError(
            f"{name} must return one tensor, got {type(y).__name__}; convert a module that returns just one of them"
        )
    try:
        with torch.no_grad():
            return trace(twin, x, _is_part, lambda m, path: None)
    except UntraceableError as error:
        raise ConversionError(f"{error}\n{_UNTRACEABLE}") from error


def _is_part(m: nn.Module) -> bool:
    """Whether a module has a rule, or is one of torch that does more than call its own parts."""
    of_torch = type(m).__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
    return of_torch or rule_for(m) is not None


def _check(new: fx.GraphModule, x: Tensor, before: dict[str, torch.Size]) -> None:
    """The new network runs, with the shapes of the old one, and its bound is 1."""
    try:
        with torch.no_grad():
            ShapeProp(new).propagate(x.repeat(2, *[1] * (x.ndim - 1)))
    except RuntimeError as error:
        raise ConversionError(f"the new network does not take what the old one did: {error}") from error
    metas = {node.name: node.meta.get("tensor_meta") for node in new.graph.nodes}
    after = {name: meta.shape for name, meta in metas.items() if hasattr(meta, "shape") and name in before}
    if changed := [f"  {n}: {tuple(before[n])}, now {tuple(s)}" for n, s in after.items() if before[n] != s]:
        raise ConversionError("these values would have other shapes:\n" + "\n".join(changed))
    try:
        bound = lipschitz_bound(new, x.shape[1:])
    except TypeError as error:  # what a rule has put there has no bound
        raise ConversionError(f"the new network has a part without a bound: {error}\n{_UNBOUNDED}") from error
    if bound > 1 + 1e-3:
        raise ConversionError(f"the bound is {bound:.4g}: layers of orthoconv.nn are kept as they are, and some expand")
