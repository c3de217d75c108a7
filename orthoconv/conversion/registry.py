"""The registry of conversions: for each kind of part, the 1-Lipschitz part that takes its place, and why it is one."""

__all__ = ["ConversionRule", "Joined", "Make", "Part", "conversion_rules", "register_conversion", "rule_for"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from orthoconv.certificates.trust import is_plain


@dataclass(frozen=True)
class Part:
    """A part of a network, as a rule sees it.

    Attributes:
        module: The module; for a function, the module that computes the same, or None.
        inputs: Shape of each tensor that comes from the input of the network, batch included.
        output: Shape of its value, batch included.
        constants: Arguments that are not such tensors: numbers, and tensors of the network.
        options: Its other arguments, by name.
        before: The module that computes its first input, or None.
        lengths: For each input, the length of the shortest way from the input of the network.
        same: Whether its two inputs are one value.
        separate: Whether its inputs come from separate pieces of one value.
        share: Share that a longer branch of a sum starts with.
        scores: Whether no layer with weights comes after it, and the network ends in vectors (b, n).
        conv: Makes a convolution, with the arguments of nn.Conv2d.
        linear: Makes a linear layer, with the arguments of nn.Linear.
        transposed: Makes the adjoint of a convolution, with the arguments of nn.ConvTranspose2d.
        volumes: Makes a convolution of volumes, with the arguments of nn.Conv3d.
        keep: Gives the new layer, the first argument, its first weights; perhaps those of the old layer, the second.
        made: Layers that were made already, by the module that they replace.
    """

    module: nn.Module | None
    inputs: tuple[torch.Size, ...]
    output: torch.Size
    constants: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    before: nn.Module | None = None
    lengths: tuple[int, ...] = ()
    same: bool = False
    separate: bool = False
    share: float = 0.5
    scores: bool = False
    conv: Callable[..., nn.Module] = nn.Conv2d
    linear: Callable[..., nn.Module] = nn.Linear
    transposed: Callable[..., nn.Module] = nn.ConvTranspose2d
    volumes: Callable[..., nn.Module] = nn.Conv3d
    keep: Callable[[nn.Module, nn.Module], None] = lambda new, old: None
    made: dict[Any, nn.Module] = field(default_factory=dict)

    def once(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return what `make` returns; the same layer again where the network calls one module in several places."""
        if self.module not in self.made:
            self.made[self.module] = make()
        return self.made[self.module]

    def layer(self, make: Callable[[], nn.Module]) -> nn.Module:
        """`once` for a layer that takes the place of one with weights; `keep` says what it starts from."""
        known = self.module in self.made
        new = self.once(make)
        if not known and self.module is not None:
            self.keep(new, self.module)
        return new


class Joined(NamedTuple):
    """A module of several inputs, or None for the part itself, and what is done to each input before, or None."""

    module: nn.Module | None
    before: tuple[nn.Module | None, ...]


Make = Callable[[Part], "nn.Module | Joined | None"]


class ConversionRule(NamedTuple):
    """What takes the place of a part.

    Attributes:
        make: Makes it from a `Part`; None to leave the part as it is. It raises a ValueError for a part that it does
            not take, which says what to do instead.
        proof: Why it is 1-Lipschitz, in one sentence.
    """

    make: Make
    proof: str


_RULES: dict[Any, ConversionRule] = {}


def register_conversion(*keys: Any, make: Make, proof: str) -> None:
    """Tell `convert` what to put in the place of a kind of part.

    What it puts there must have a bound of at most 1 by `lipschitz_bound`, which looks at the whole network in the end;
    so a rule that is wrong is found out. The newest rule for a key holds.

    Arguments:
        keys: Types of modules, functions of torch, names of methods of tensors, or names of classes. A rule for a type
            holds for subclasses that compute the same; the forward pass of others is followed.
        make: Function of a `Part` that returns the module in its place, or `Joined` for several inputs, or None for the
            part itself. A ValueError refuses the part; its text goes into the `ConversionError`.
        proof: Why the new part is 1-Lipschitz, in one sentence.

    >>> class Loud(nn.Module):
    ...     def forward(self, x):
    ...         return 5 * x
    >>> register_conversion(Loud, make=lambda part: nn.Identity(), proof="The identity keeps distances.")
    >>> from orthoconv import convert
    >>> convert(Loud(), (3,))(torch.ones(1, 3))
    tensor([[1., 1., 1.]])
    """
    if not keys or not callable(make) or not proof:
        raise ValueError(f"a conversion needs keys, a function make and a proof, got {keys!r}, {make!r} and {proof!r}")
    for key in keys:
        if not (isinstance(key, type | str) or callable(key)):
            raise ValueError(f"a key must be a type of modules, a function or a name, got {key!r}")
    _RULES.update(dict.fromkeys(keys, ConversionRule(make, proof)))


def conversion_rules() -> dict[Any, ConversionRule]:
    """All rules by their keys, to read."""
    return dict(_RULES)


def rule_for(what: Any) -> ConversionRule | None:
    """Return the rule for a module, a function, or the name of a method; None if there is none."""
    if not isinstance(what, nn.Module):
        return _RULES.get(what) if getattr(what, "__hash__", None) is not None else None
    kind = type(what)
    known = next((cls for cls in kind.__mro__ if cls in _RULES), None)
    if known is not None and is_plain(what, known):
        return _RULES[known]
    return None if kind.__module__.startswith(("torch.", "orthoconv.")) else _RULES.get(kind.__name__)
