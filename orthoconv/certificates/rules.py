"""Rules: the Lipschitz constant and the rounding of modules that are not of this library, torch's own among them."""

__all__ = ["Figure", "Rule", "base_with_rule", "figures_of", "register_rule", "rule_of"]

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from orthoconv import fourier
from orthoconv.certificates.trust import is_plain, require_as_defined
from orthoconv.linalg import frobenius_norm, spectral_norm
from orthoconv.nn.kernel import kernel_units
from orthoconv.nn.layer import Combination, Layer

Shape = Sequence[int]
Figure = Callable[[Any, Shape], float]  # of a module, and of the shape of one input


class Rule(NamedTuple):
    """What is known of a type of module; see `register_rule`."""

    lipschitz: Figure
    rounding: Figure | None
    constants: Callable[[Any, Shape], float | None] | None = None


def register_rule(
    *types: type[nn.Module],
    lipschitz: float | Figure,
    rounding: float | Figure | None = None,
    constants: Figure | None = None,
) -> None:
    """Tell certificates what a type of module does to distances, and how it rounds.

    Each figure is a number, or a function of (module, shape of one input). The rule holds for subclasses, too, unless
    they have methods of their own that may change what is computed.

    Arguments:
        types: Types of modules.
        lipschitz: Upper bound of the Lipschitz constant, in the l2 norm.
        rounding: Bound of |computed - exact| / |x| in units of rounding (2^-24 in float32), to first order and without
            constants that are added; 0 for a module that only moves entries or compares them. Without it, `certify` and
            `rounding_bound` name the module and stop; ``certify(..., rounding=False)`` goes on.
        constants: Norm of what the module adds; by default the norm of its value at zero.

    >>> class Negative(nn.Module):
    ...     def forward(self, x):
    ...         return -x
    >>> register_rule(Negative, lipschitz=1.0, rounding=0.0)
    >>> from orthoconv import lipschitz_bound
    >>> lipschitz_bound(Negative(), (3,))
    1.0
    """
    rule = Rule(_figure(lipschitz), None if rounding is None else _figure(rounding), constants)
    _RULES.update(dict.fromkeys(types, rule))


def _figure(value: float | Figure) -> Figure:
    return value if callable(value) else lambda module, shape: value


_BY_LAYER = Rule(
    lambda layer, shape: layer.lipschitz(shape),
    lambda layer, shape: layer.rounding_units(shape),
    lambda layer, shape: layer.constants(shape),
)
_OF_PARTS = Rule(lambda module, shape: math.nan, None)  # the walk looks at the parts
_RULES: dict[type[nn.Module], Rule] = {nn.Sequential: _OF_PARTS, fx.GraphModule: _OF_PARTS}


def rule_of(module: nn.Module, path: str) -> Rule:
    """Return the rule for a module, which must do what its class says; otherwise raise an error that names its path."""
    kind = type(module)
    known = base_with_rule(kind)
    if known is None or not is_plain(module, known):
        raise TypeError(
            f"there is no rule for {kind.__module__}.{kind.__name__}, at {path}; "
            f"give it one with orthoconv.register_rule"
        )
    require_as_defined(module, path)
    return _RULES.get(known, _OF_PARTS if issubclass(known, Combination) else _BY_LAYER)


def figures_of(module: nn.Module) -> tuple[Figure, Figure]:
    """Return the Lipschitz constant and the rounding that a module of torch has a rule for."""
    rule = _RULES[type(module)]
    assert rule.rounding is not None
    return rule.lipschitz, rule.rounding


def base_with_rule(kind: type) -> type | None:
    """Return the first base of a class that has a rule, or answers by itself; None if there is none."""
    return next((cls for cls in kind.__mro__ if cls in _RULES or _answers(cls)), None)


def _answers(cls: type) -> bool:
    """Whether a class says by itself what its Lipschitz constant is, or how those of its parts combine."""
    own = vars(cls)
    return (issubclass(cls, Layer) and "lipschitz" in own) or (issubclass(cls, Combination) and "growth" in own)


# torch's own modules


def _linear_units(module: nn.Linear, shape: Shape) -> float:
    return (module.in_features + 1) * frobenius_norm(module.weight)


def _conv_norm(module: nn.Conv2d, shape: Shape) -> float:
    """A convolution padded by zeros is a part of the circular one on a torus with room for the kernel."""
    spans = [d * (k - 1) for d, k in zip(module.dilation, module.weight.shape[2:], strict=True)]
    h, w = shape[-2:]
    if module.padding_mode == "circular":
        paddings = module._reversed_padding_repeated_twice[::-1]
        if [sum(paddings[:2]), sum(paddings[2:])] != spans:
            raise TypeError(f"a circular convolution is bounded if its padding keeps the size, got {module}")
    elif module.padding_mode == "zeros":
        h, w = h + spans[0], w + spans[1]
    else:
        raise TypeError(f"a convolution is bounded if its padding is by zeros or circular, got {module}")
    weight = module.weight.detach().double()
    return spectral_norm(fourier.spectrum(weight, (h, w), dilation=module.dilation, groups=module.groups))


def _transposed_norm(module: nn.ConvTranspose2d, shape: Shape) -> float:
    """The adjoint of a convolution, on a torus with room for the kernel and for the zeros between the pixels."""
    axes = zip(shape[-2:], module.stride, module.dilation, module.weight.shape[2:], strict=True)
    h, w = ((n - 1) * s + 1 + d * (k - 1) for n, s, d, k in axes)
    weight = module.weight.detach().double()
    return spectral_norm(fourier.spectrum(weight, (h, w), dilation=module.dilation, groups=module.groups))


def _softplus(module: nn.Softplus, shape: Shape) -> float:
    """It jumps at its threshold, from 40 on by less than float64 can show; float32 overflows before 89."""
    if not 40 <= module.threshold <= 80 or not module.beta > 0:
        raise TypeError(
            f"Softplus is bounded with a positive beta, and a threshold from 40 to 80 in place of torch's 20, where it "
            f"jumps; got {module}"
        )
    return 1.0


def _in_eval_mode(module: nn.Module, shape: Shape) -> float:
    if module.training:
        raise TypeError(f"{type(module).__name__} is bounded in eval mode only; call model.eval()")
    return 1.0


def _batch_norm(module: nn.BatchNorm2d, shape: Shape) -> float:
    return _in_eval_mode(module, shape) * float(_gains(module).max())


def _gains(norm: nn.BatchNorm2d) -> Tensor:
    """What batch normalisation multiplies each channel by, without its sign."""
    if norm.running_var is None:
        raise TypeError(f"{type(norm).__name__} is bounded if it has running statistics, got {norm}")
    gain = 1.0 if norm.weight is None else norm.weight.double().abs()
    return gain / (norm.running_var.double() + norm.eps).sqrt()


def _batch_norm_constants(norm: nn.BatchNorm2d, shape: Shape) -> float:
    """Norm of what batch normalisation adds: mean and bias, which may cancel."""
    assert norm.running_mean is not None
    moved = frobenius_norm(_gains(norm) * norm.running_mean.double())
    bias = 0.0 if norm.bias is None else frobenius_norm(norm.bias)
    return (moved + bias) * math.sqrt(torch.Size(shape[1:]).numel())


def _softmax(module: nn.Softmax, shape: Shape) -> float:
    """The Jacobian is diag(p) - p p*: for a unit vector v, the variance of v under p, at most (max v - min v)^2 / 4."""
    if module.dim is None or module.dim % (len(shape) + 1) == 0:
        raise TypeError(f"Softmax is bounded along an axis other than that of the batch, got {module}")
    return 0.5


def _elu(module: nn.ELU, shape: Shape) -> float:
    return max(1.0, abs(module.alpha))


def _elu_constants(module: nn.ELU, shape: Shape) -> float:
    """Norm of alpha in each entry: torch 2.6 computes alpha (exp(x) - 1), whose error is that of rounding 1."""
    return abs(module.alpha) * math.sqrt(torch.Size(shape).numel())


def _padding(module: nn.ConstantPad2d, shape: Shape) -> float:
    if not math.isfinite(module.value):
        raise TypeError(f"padding is bounded if it adds a finite number, got {module.value}; pad by the pool after it")
    return 1.0


def _prelu(module: nn.PReLU, shape: Shape) -> float:
    return max(float(module.weight.detach().double().abs().max()), 1.0)  # in this order NaN stays NaN


def _slope(module: nn.LeakyReLU, shape: Shape) -> float:
    return max(1.0, abs(module.negative_slope))


def _corners(module: nn.Hardtanh, shape: Shape) -> float:
    """Norm of the largest value, which is rounded to the precision of the input."""
    return max(abs(module.min_val), abs(module.max_val)) * math.sqrt(torch.Size(shape).numel())


register_rule(
    nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle,
    nn.ReLU, nn.ReLU6,
    lipschitz=1.0, rounding=0.0,
)  # fmt: skip
register_rule(nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, lipschitz=_padding, rounding=0.0)
register_rule(nn.Hardtanh, lipschitz=1.0, rounding=0.0, constants=_corners)
register_rule(nn.Tanh, nn.Softsign, nn.LogSigmoid, lipschitz=1.0, rounding=16.0)
register_rule(nn.Softmax, lipschitz=_softmax, rounding=64.0)
register_rule(nn.Sigmoid, lipschitz=0.25, rounding=16.0)
register_rule(nn.Softplus, lipschitz=_softplus, rounding=16.0)
register_rule(nn.Softshrink, lipschitz=1.0, rounding=4.0)
register_rule(nn.Hardsigmoid, lipschitz=1 / 6, rounding=4.0)
register_rule(nn.ELU, lipschitz=_elu, rounding=lambda m, shape: 16 * _elu(m, shape), constants=_elu_constants)
register_rule(nn.PReLU, lipschitz=_prelu, rounding=lambda m, shape: 2 * _prelu(m, shape))
register_rule(nn.LeakyReLU, lipschitz=_slope, rounding=lambda m, shape: 2 * _slope(m, shape))
register_rule(nn.Linear, lipschitz=lambda m, shape: spectral_norm(m.weight), rounding=_linear_units)
register_rule(nn.Conv2d, lipschitz=_conv_norm, rounding=lambda m, shape: kernel_units(m.weight))
register_rule(nn.ConvTranspose2d, lipschitz=_transposed_norm, rounding=lambda m, shape: kernel_units(m.weight))
register_rule(
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    lipschitz=_in_eval_mode, rounding=0.0,
)  # fmt: skip
register_rule(
    nn.BatchNorm1d, nn.BatchNorm2d,
    lipschitz=_batch_norm, rounding=lambda m, shape: 8 * float(_gains(m).max()), constants=_batch_norm_constants,
)  # fmt: skip
