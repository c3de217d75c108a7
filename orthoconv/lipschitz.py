"""Lipschitz constants: a sound upper bound from the layers of a model, and a lower bound by looking for one."""

__all__ = [
    "batch_norm_gains",
    "convex",
    "empirical_lipschitz",
    "lipschitz_bound",
    "register_lipschitz_rule",
    "rule_of",
    "zeros",
]

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from orthoconv import fourier
from orthoconv.linalg import row_norms
from orthoconv.nn import ConvexResidual, GroupSort, InvertibleDownsample, MaxMin, Normalize, Scale, ScaledAvgPool2d
from orthoconv.nn.base import BaseConv2d, ints, pair
from orthoconv.nn.linear import BaseLinear
from orthoconv.nn.memory import frozen

Child = Callable[[str, nn.Module, Tensor], float]
Rule = Callable[[nn.Module, Tensor, Child], float]

_RULES: dict[type[nn.Module], Rule] = {}


def lipschitz_bound(model: nn.Module, input_shape: Sequence[int]) -> float:
    """Upper bound of the Lipschitz constant of `model`, in the l2 norm, for inputs of that shape.

    It is made of the norms of the layers as they are: a convolution counts with the largest singular value of its
    operator in the precision of its parameters, found in float64 and rounded up; so "1" may become 1.0000003. It
    bounds the function of exact arithmetic with these operators; `certify` adds what rounding does to a forward pass.

    Arguments:
        model: Made of layers that have a rule; see `register_lipschitz_rule`.
        input_shape: Shape of one input, without the batch.

    >>> from orthoconv.nn import CayleyConv2d
    >>> round(lipschitz_bound(nn.Sequential(CayleyConv2d(3, 8, 3), nn.ReLU(), Scale(0.5)), (3, 8, 8)), 4)
    0.5
    """
    x = zeros(model, input_shape)
    with torch.no_grad(), frozen(model):
        bound = _bound(model, x.clone(), type(model).__name__)
        model(x)  # a shape that the model does not take is an error of the model
    return bound


def register_lipschitz_rule(*types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Decorator for the rule of a type of module: a function of (module, input, child) that returns its bound.

    The input is a tensor of the right shape, and ``child(name, module, input)`` is the bound of a module inside.
    The rule is used for subclasses, too, unless they have methods of their own that may change what is computed.

    >>> class Negative(nn.Module):
    ...     def forward(self, x):
    ...         return -x
    >>> rule = register_lipschitz_rule(Negative)(lambda module, x, child: 1.0)
    >>> lipschitz_bound(Negative(), (3,))
    1.0
    """

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(types, rule))
        return rule

    return register


def zeros(model: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """A batch of one input of that shape, zero, as the model takes it."""
    if not isinstance(input_shape, Sequence):
        raise ValueError(f"input_shape must be the shape of one input, such as (3, 32, 32), got {input_shape!r}")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device)


def _bound(module: nn.Module, x: Tensor, path: str) -> float:
    bound = rule_of(module, path)(module, x, lambda name, child, y: _bound(child, y, f"{path}.{name}"))
    if not math.isfinite(bound):
        raise ValueError(f"lipschitz_bound found {bound} at {path} ({type(module).__name__}); are its weights finite?")
    return bound


def rule_of(module: nn.Module, path: str) -> Rule:
    """The rule for a module, which must do what its class says; or an error that names its path."""
    kind = type(module)
    known = next((cls for cls in kind.__mro__ if cls in _RULES), None)
    if known is None or not all(map(_is_faithful, kind.__mro__[: kind.__mro__.index(known)])):
        raise TypeError(
            f"lipschitz_bound has no rule for {kind.__module__}.{kind.__name__}, at {path}; "
            f"give it one with orthoconv.register_lipschitz_rule"
        )
    require_as_defined(module, path)
    return _RULES[known]


def require_as_defined(module: nn.Module, path: str) -> None:
    """Raise an error if a module does not do what its class says."""
    if "forward" in vars(module):
        raise TypeError(f"lipschitz_bound has no rule for the own forward of {path} ({type(module).__name__})")
    if module._forward_hooks or module._forward_pre_hooks:
        raise TypeError(f"lipschitz_bound cannot see what the forward hooks of {path} do; remove them")


def _is_faithful(cls: type) -> bool:
    """Whether a subclass leaves alone what its base computes: it is of this library, or has only harmless methods.

    `operator` and its parts are harmless: the bound of a layer of ours is that of what they return.
    """
    if cls.__module__.startswith(("orthoconv.nn.", "torch.nn.utils.parametrize", "torch.fx.graph_module")):
        return True
    methods = {k for k, v in vars(cls).items() if callable(v) or isinstance(v, staticmethod | classmethod | property)}
    return methods <= {"__init__", "__repr__", "extra_repr", "reset_parameters", "operator", "orthogonalize", "sources"}


def _norm(D: Tensor) -> float:
    """Largest singular value among matrices (..., m, n), rounded up."""
    D = D.detach().to(torch.complex128 if D.is_complex() else torch.float64)
    D = D if D.shape[-2] >= D.shape[-1] else D.mH
    largest = torch.linalg.eigvalsh(D.mH @ D)[..., -1].max().clamp_min(0).sqrt().item()
    return float(largest * (1 + 10 * max(D.shape[-2:]) * torch.finfo(torch.float64).eps))


@register_lipschitz_rule(nn.Sequential)
def _sequential(module: nn.Module, x: Tensor, child: Child) -> float:
    bound = 1.0
    for name, layer in module._modules.items():  # named_children would leave out a layer that stands in two places
        assert layer is not None
        bound *= child(name, layer, x)
        x = layer(x)
    return bound


@register_lipschitz_rule(ConvexResidual)
def _residual(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, ConvexResidual)
    module(x)  # its branches must have one shape
    if any(getattr(part, "inplace", False) for part in module.modules()):
        raise TypeError("lipschitz_bound takes a ConvexResidual with nothing in place")
    s, rest = convex(module.alpha)
    return s * child("f", module.f, x) + rest * child("skip", module.skip, x)


def convex(alpha: Tensor) -> tuple[float, float]:
    """sigmoid(alpha) and 1 minus it, each with all its digits."""
    return torch.sigmoid(alpha.double()).item(), torch.sigmoid(-alpha.double()).item()


@register_lipschitz_rule(BaseConv2d)
def _convolution(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, BaseConv2d)
    return _norm(module.spectrum((x.shape[-2], x.shape[-1]), double=True))  # groups are blocks: the maximum over them


@register_lipschitz_rule(BaseLinear)
def _reparametrized_linear(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, BaseLinear)
    return _norm(module.recall())


@register_lipschitz_rule(nn.Linear)
def _linear(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, nn.Linear)
    return _norm(module.weight)


@register_lipschitz_rule(nn.Conv2d)
def _torch_convolution(module: nn.Module, x: Tensor, child: Child) -> float:
    """A convolution padded by zeros is a part of the circular one on a torus with room for the kernel."""
    assert isinstance(module, nn.Conv2d)
    spans = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    h, w = x.shape[-2:]
    if module.padding_mode == "circular":
        paddings = module._reversed_padding_repeated_twice[::-1]
        if [sum(paddings[:2]), sum(paddings[2:])] != spans:
            raise TypeError(f"lipschitz_bound takes circular padding that keeps the size, got {module}")
    elif module.padding_mode == "zeros":
        h, w = h + spans[0], w + spans[1]
    else:
        raise TypeError(f"lipschitz_bound takes padding by zeros or circular, got {module}")
    weight = module.weight.detach().double()
    return _norm(fourier.spectrum(weight, (h, w), dilation=module.dilation, groups=module.groups))


@register_lipschitz_rule(
    GroupSort, InvertibleDownsample, MaxMin, ScaledAvgPool2d,
    nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh,
    nn.Softsign, nn.LogSigmoid,
)  # fmt: skip
def _one(module: nn.Module, x: Tensor, child: Child) -> float:
    return 1.0


@register_lipschitz_rule(nn.LeakyReLU)
def _leaky(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, nn.LeakyReLU)
    return max(1.0, abs(module.negative_slope))


@register_lipschitz_rule(nn.Softplus)
def _softplus(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, nn.Softplus)
    if module.threshold < 20:  # it jumps there, by less than rounding from 20 on
        raise TypeError(f"lipschitz_bound takes Softplus with a threshold of at least 20, got {module}")
    return 1.0


@register_lipschitz_rule(nn.Sigmoid)
def _sigmoid(module: nn.Module, x: Tensor, child: Child) -> float:
    return 0.25


@register_lipschitz_rule(Normalize)
def _normalize(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, Normalize)
    return 1 / float(module.std.double().min())


@register_lipschitz_rule(Scale)
def _scale(module: nn.Module, x: Tensor, child: Child) -> float:
    assert isinstance(module, Scale)
    return abs(module.factor)


@register_lipschitz_rule(nn.AvgPool2d, nn.MaxPool2d)
def _pooling(module: nn.Module, x: Tensor, child: Child) -> float:
    """Each window is bounded by the norm of its weights (1 for a maximum); a pixel stands in a number of windows."""
    assert isinstance(module, nn.AvgPool2d | nn.MaxPool2d)
    (kh, kw), (sh, sw) = (pair("size", v) for v in (module.kernel_size, module.stride))
    dilated = isinstance(module, nn.MaxPool2d) and pair("dilation", module.dilation) != (1, 1)
    windows = kh * kw if dilated else math.ceil(kh / sh) * math.ceil(kw / sw)
    weight = 1.0
    if isinstance(module, nn.AvgPool2d):
        weight = math.sqrt(kh * kw) / abs(module.divisor_override or kh * kw)
        if module.ceil_mode or (ints(module.padding) != (0, 0) and not module.count_include_pad):
            weight = max(1.0, weight)  # a window at the border may hold a single pixel
    return weight * math.sqrt(windows)


@register_lipschitz_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout, nn.Dropout2d)
def _only_in_eval_mode(module: nn.Module, x: Tensor, child: Child) -> float:
    if module.training:
        raise TypeError(f"lipschitz_bound takes {type(module).__name__} in eval mode only; call model.eval()")
    if not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return 1.0
    return float(batch_norm_gains(module).max())


def batch_norm_gains(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> Tensor:
    """What batch normalisation multiplies each channel by, without its sign."""
    if norm.running_var is None:
        raise TypeError(f"lipschitz_bound takes {type(norm).__name__} with running statistics, got {norm}")
    gain = 1.0 if norm.weight is None else norm.weight.double().abs()
    return gain / (norm.running_var.double() + norm.eps).sqrt()


def empirical_lipschitz(
    model: nn.Module,
    x: Tensor,
    eps: float,
    *,
    steps: int = 10,
    bounds: tuple[float, float] | None = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Local Lipschitz constants found by ascent (Section 5.2; Yang et al., 2020): a lower bound for each example.

    Looks for the perturbation d, of norm at most `eps`, that makes |f(x + d) - f(x)| / |d| large: normalised gradient
    steps of eps / 4 from a random start.

    Arguments:
        model: Function of a batch.
        x: Batch of inputs.
        eps: Radius of the ball; it must stand out from the rounding of the inputs.
        steps: Steps of ascent.
        bounds: Smallest and largest value of an input, or None.
        generator: Source of the random start.

    Returns:
        Shape (b,), the largest ratio met for each example.

    >>> empirical_lipschitz(Scale(0.5), torch.rand(2, 3), eps=0.1)
    tensor([0.5000, 0.5000])
    """
    least = 1e4 * torch.finfo(x.dtype).eps * float(row_norms(x.detach()).max()) if len(x) else 0.0
    if not eps > least:
        raise ValueError(f"eps must be more than {least:.2g}, the rounding of these inputs in {x.dtype}, got {eps!r}")
    low, high = (-math.inf, math.inf) if bounds is None else bounds
    column = [-1, *[1] * (x.ndim - 1)]
    tiny = torch.finfo(x.dtype).tiny

    def project(d: Tensor) -> Tensor:
        d = (x + d).clamp(low, high) - x
        return d * (eps / row_norms(d).clamp_min(eps)).view(column)

    noise = torch.empty(x.shape, dtype=x.dtype).uniform_(-eps, eps, generator=generator)
    d = project(noise.to(x.device))
    best = x.new_zeros(len(x))
    with torch.inference_mode(False), torch.enable_grad(), frozen(model):
        x, d = x.detach().clone(), d.clone()
        y = model(x).detach()
        for step in range(steps + 1):
            z = (x + d).detach().requires_grad_()
            ratios = row_norms(model(z) - y) / row_norms(z - x).clamp_min(tiny)
            best = torch.maximum(best, ratios.detach())
            if step < steps:
                (grad,) = torch.autograd.grad(ratios.sum(), z)
                d = project((z - x).detach() + eps / 4 * grad / row_norms(grad).clamp_min(tiny).view(column))
    return best
