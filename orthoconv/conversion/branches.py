"""Rules for what brings branches together: sums, products, concatenations, maxima."""

__all__: list[str] = []

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from orthoconv.conversion.registry import Joined, Part, register_conversion
from orthoconv.nn import ConvexSum, Gain, Scale, Shift, Spread, UnitCat

_CONVEX = (
    "|s dx + (1 - s) dy| <= max(|dx|, |dy|) for s in [0, 1], and a value spread over n entries is divided by root n."
)


def _sum(part: Part) -> nn.Module | Joined | None:
    if len(part.inputs) == 1:
        return _plus(part)
    return _convex(part, (None, None))


def _difference(part: Part) -> nn.Module | Joined | None:
    if len(part.inputs) == 1:
        return _plus(part)
    apart = replace(part, share=min(part.share, 0.25))  # halves of x would cancel near the identity
    return _convex(apart, (None, Scale(-1.0)), equal=0.75)


def _plus(part: Part) -> nn.Module | None:
    """A number or a tensor of the network that is added: it stays, and a parameter is learned as before."""
    (constant,) = part.constants
    if not isinstance(constant, nn.Parameter):
        return None
    shift = Shift(_numbers(constant, part.inputs[0]))
    shift.bias.data.copy_(constant.detach().reshape(shift.bias.shape))
    return shift


def _product(part: Part) -> nn.Module | Joined | None:
    """A gate becomes a convex sum with what it would multiply; a learned scale one of numbers up to 1."""
    if part.same:
        raise ValueError("it multiplies a value by itself, which has no Lipschitz constant; use an activation")
    if len(part.inputs) == 2:
        return _convex(part, (None, None))
    (constant,) = part.constants
    if isinstance(constant, Tensor):
        gain = Gain(_numbers(constant, part.inputs[0]))
        if not isinstance(constant, nn.Parameter):
            value = constant.detach().reshape(gain.weight.shape)
            gain.weight.data.copy_(value / value.abs().max().clamp_min(1))
        return gain
    return Scale(max(-1.0, min(1.0, float(constant))))


def _quotient(part: Part) -> nn.Module | Joined | None:
    if len(part.inputs) == 2 or not part.constants:
        raise ValueError("it divides by a value of the network, which has no Lipschitz constant; leave it out")
    (constant,) = part.constants
    if isinstance(constant, Tensor):
        return Gain(_numbers(constant, part.inputs[0]))
    return Scale(max(-1.0, min(1.0, 1 / float(constant))))


def _numbers(constant: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Shape of a tensor of the network without an axis of the batch, which must have length 1."""
    sides = tuple(constant.shape)
    while len(sides) >= len(shape):
        if sides[0] != 1:
            raise ValueError(f"a tensor of shape {sides} would tell the examples of a batch apart")
        sides = sides[1:]
    return sides or (1,)


def _convex(part: Part, before: tuple[nn.Module | None, nn.Module | None], equal: float = 0.5) -> Joined:
    """A convex sum that favours the shorter branch, so that a change of the input arrives.

    Arguments:
        equal: Weight of the first branch if none is shorter.
    """
    steps = [_spread(shape, part.output, first) for shape, first in zip(part.inputs, before, strict=True)]
    a, b = part.lengths
    weight = equal if a == b else 1 - part.share if a < b else part.share
    return Joined(ConvexSum(weight), tuple(steps))


def _spread(shape: torch.Size, output: torch.Size, first: nn.Module | None) -> nn.Module | None:
    if shape == output:
        return first
    spread = Spread(output[1:])
    return spread if first is None else nn.Sequential(first, spread)


def _cat(part: Part) -> nn.Module | Joined | None:
    if any(isinstance(c, Tensor) for c in part.constants):
        raise ValueError("it puts a tensor of the network beside its values; add it by x + tensor instead")
    if part.separate:
        return None
    axis = _axis(part, part.inputs[0])
    shares = [max(shape[axis], 1e-3) for shape in part.inputs]  # all channels weigh the same, and no channels nothing
    return UnitCat(len(part.inputs), axis, shares)


def _stack(part: Part) -> Joined:
    axis, (_, channels, *_) = _axis(part, part.output), part.inputs[0]
    if axis not in (1, 2):
        raise ValueError(f"it stacks values along axis {axis}; use torch.cat along the channels")
    sides = (1, channels) if axis == 1 else (channels, 1)
    return Joined(UnitCat(len(part.inputs), axis), tuple(nn.Unflatten(1, sides) for _ in part.inputs))


def _axis(part: Part, shape: torch.Size) -> int:
    given: Any = part.options.get("dim", part.options.get("axis", part.constants[0] if part.constants else 0))
    axis = int(given) % len(shape)
    if axis == 0:
        raise ValueError("it puts values side by side along the batch, whose examples must stay apart; use dim=1")
    return axis


def _repeated(part: Part) -> nn.Module:
    """Copies of a value side by side along the channels, or along axes of length 1, over the root of their number."""
    given = part.constants[0] if len(part.constants) == 1 and not isinstance(part.constants[0], int) else part.constants
    (_, *sides), counts = part.inputs[0], [int(n) for n in given]
    if (
        len(counts) != len(sides) + 1
        or counts[0] != 1
        or any(n > 1 < side for n, side in zip(counts[2:], sides[1:], strict=True))
    ):
        raise ValueError(f"it repeats a value {tuple(given)} times; only channels can be repeated, or axes of length 1")
    copies = Spread((counts[1], sides[0], *part.output[2:]))
    return nn.Sequential(nn.Unflatten(1, (1, sides[0])), copies, nn.Flatten(1, 2))


def _interleaved(part: Part) -> nn.Module:
    """Each channel several times, over the root of how often."""
    given = dict(zip(("repeats", "dim"), part.constants, strict=False)) | dict(part.options)
    n, shape = given.get("repeats"), part.inputs[0]
    if not isinstance(n, int) or given.get("dim") not in (1, 1 - len(shape)):
        raise ValueError(f"repeat_interleave is known for one number of repeats and dim=1, got {given}")
    copies = Spread((shape[1], n, *shape[2:]))
    return nn.Sequential(nn.Unflatten(1, (shape[1], 1)), copies, nn.Flatten(1, 2))


def _extreme(part: Part) -> nn.Module | Joined | None:
    if len(part.inputs) != 2:
        raise ValueError("a maximum over an axis has no rule; use nn.AdaptiveMaxPool2d or F.max_pool2d")
    return None if part.separate else Joined(None, (Scale(0.5**0.5), Scale(0.5**0.5)))


register_conversion(torch.add, operator.add, "add", make=_sum, proof=_CONVEX)
register_conversion(torch.sub, operator.sub, "sub", "rsub", make=_difference, proof=_CONVEX)
register_conversion(
    torch.mul, operator.mul, "mul", "multiply", torch.multiply, make=_product,
    proof=f"A gate is added, not multiplied: {_CONVEX} Numbers that multiply are at most 1.",
)  # fmt: skip
register_conversion(torch.div, operator.truediv, "div", make=_quotient, proof="Numbers that multiply are at most 1.")
register_conversion(
    torch.cat, torch.concat, make=_cat,
    proof="|w_1 dx_1|^2 + ... <= max |dx_i|^2 with w_1^2 + ... = 1; separate pieces of one value need no weights.",
)  # fmt: skip
register_conversion(torch.stack, make=_stack, proof="As torch.cat.")
register_conversion(
    torch.max, torch.min, "max", "min", torch.maximum, torch.minimum, "maximum", "minimum", make=_extreme,
    proof="|max(x, y) - max(x', y')|^2 <= |dx|^2 + |dy|^2, entry by entry.",
)  # fmt: skip
register_conversion(
    "expand", "expand_as", make=lambda part: Spread(part.output[1:]),
    proof="A value spread over n entries is divided by root n.",
)  # fmt: skip
register_conversion("repeat", make=_repeated, proof="A value that stands n times is divided by root n.")
register_conversion(
    torch.repeat_interleave, "repeat_interleave", make=_interleaved,
    proof="A value that stands n times is divided by root n.",
)  # fmt: skip
register_conversion(torch.neg, operator.neg, "neg", make=lambda part: None, proof="It keeps distances.")
register_conversion(
    torch.zeros_like, make=lambda part: Scale(0.0), proof="It is constant, the value that it is like times 0."
)
