"""Operators computed from parameters, and remembered only as long as the parameters stay the same."""

__all__ = ["Reparametrized", "frozen"]

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from orthoconv import budget
from orthoconv.autograd import gradients_of, with_gradient
from orthoconv.nn.arguments import Pair, check_precision, check_trainable, flag
from orthoconv.nn.geometry import Geometry
from orthoconv.nn.layer import Layer
from orthoconv.tracing import full_precision, is_concrete


class _Memory(NamedTuple):
    """Operators by image size, each with the version of its tensor; numbers; and all that they were computed from.

    It is replaced and never changed, so threads that share a layer need no lock.
    """

    settings: dict[str, Any] = {}  # noqa: RUF012
    snapshot: tuple[Tensor, ...] = ()
    operators: dict[Hashable, tuple[Tensor, int]] = {}  # noqa: RUF012
    numbers: dict[Hashable, float] = {}  # noqa: RUF012
    stamp: "_Stamp | None" = None

    def find(self, key: Hashable) -> Tensor | None:
        """Return the operator for images of that size, unless it is not known or was edited by whoever got it."""
        value, version = self.operators.get(key, (None, 0))
        return value if value is not None and value._version == version else None

    def add(self, key: Hashable, value: Tensor) -> "_Memory":
        """Return a memory with one operator more, and without the oldest ones beyond the budget.

        The newest one always stays, whatever its size.
        """
        others = [(k, v) for k, v in self.operators.items() if k != key]
        newest = [*others, (key, (value, value._version))][-budget.SIZES_KEPT :]
        while len(newest) > 1 and sum(v.numel() * v.element_size() for _, (v, _) in newest) > budget.REMEMBERED_BYTES:
            newest = newest[1:]
        return self._replace(operators=dict(newest))


class Reparametrized(Layer):
    """Layer whose operator is a function of its parameters; abstract.

    In training mode the operator is computed at each forward pass. In eval mode, or inside `frozen`, it is remembered
    for each image size, together with the settings and a copy of the tensors that it came from. It is used again only
    while those are equal, entry by entry: no edit, however made, leaves it stale. Gradients are those of the parameters
    in every mode; where only the gradient of the input is asked for, the operator is not computed again.

    On an accelerator the host waits for each comparison. Inside `frozen` it is made once for all layers, when the
    context is entered; from then on the versions of the tensors tell, which only an edit of `.data` does not change.

    A subclass takes its own options in `set_up`; they appear in the signature of the class.
    """

    replaces: ClassVar[type[nn.Module]] = nn.Module  # the layer of torch whose place it takes
    depends_on_size: ClassVar[bool] = True
    identity: bool = False  # whether the layer starts as the identity, as near as the method comes
    _factory: dict[str, Any]  # device and dtype of the parameters
    _memory: _Memory

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        shared = list(inspect.signature(cls.__init__).parameters.values())[1:]
        own = [p for p in inspect.signature(cls.set_up).parameters.values() if p.kind is p.KEYWORD_ONLY]
        cls.__signature__ = inspect.Signature([p for p in shared if p.kind is not p.VAR_KEYWORD] + own)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self._frozen, self._memory = 0, _Memory()

    def check_arguments(self, bias: object, dtype: torch.dtype | None, options: dict[str, Any]) -> None:
        """Raise an error if the class has no option of such a name, or what was given is of the wrong kind."""
        kind = type(self)
        own: Mapping[str, inspect.Parameter] = inspect.signature(kind.set_up).parameters if options else {}
        unknown = [name for name in options if name not in own]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            known = ", ".join(inspect.signature(kind).parameters)
            raise TypeError(f"{kind.__name__} has no option {unknown[0]!r}; it takes {known}")
        check_trainable(kind.__name__, dtype)
        flag("bias", bias)
        for name in options:
            if name in own and isinstance(own[name].default, bool):
                flag(name, options[name])

    def set_up(self) -> None:
        """Check the options of the method, if it has any, and make its parameters."""

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """Make an empty parameter with the layer's device and dtype."""
        return nn.Parameter(torch.empty(shape, **self._factory))

    @abstractmethod
    def reset_parameters(self) -> None:
        """Initialise the parameters."""

    @abstractmethod
    def reset_bias(self) -> None:
        """Initialise the bias, if there is one."""

    @abstractmethod
    def sources(self) -> tuple[Tensor, ...]:
        """Tensors that determine the operator."""

    @abstractmethod
    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        """Operator on images of that size, a differentiable function of `sources` and of nothing else."""

    @abstractmethod
    def singular_values_for(self, shape: Sequence[int]) -> Tensor | None:
        """All singular values for inputs of that shape; None where a border makes it another matrix for each pixel, or
        where the layer is not linear."""

    def cached_operator(self, size: Pair = (1, 1)) -> Tensor:
        """Operator for images of that size, from memory where that is allowed.

        If you edit it in place, the layer computes another one. Clone it first if you edit it by NumPy or `.data`,
        which torch does not count as edits.
        """
        size = size if self.depends_on_size else (1, 1)
        return self.cached(size, partial(self._compute, size))

    def cached(self, key: Hashable, compute: Callable[..., Tensor]) -> Tensor:
        """Return `compute` of the sources, from memory where that is allowed; its gradient is that of the sources.

        Arguments:
            key: What tells it from the other tensors that the layer remembers.
            compute: Differentiable function of the sources.
        """
        sources = self.sources()
        if not self.remembers or not is_concrete(*sources):
            self.check()
            return compute(*sources)
        check_precision(type(self).__name__, sources[0].dtype)
        value = self.remembered(key, sources, compute)
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            return with_gradient(  # torch would not count the edits of a view, but those of a copy harm nobody
                sources, compute, lambda *_: (value.clone(), ()), lambda *a: gradients_of(compute, *a[:3])
            )
        return value

    @property
    def remembers(self) -> bool:
        """Whether the layer remembers its operator now."""
        return self._frozen > 0 or not self.training

    def check(self) -> None:
        """Raise an error if the parameters have the wrong precision, or entries that are not finite."""
        check_precision(type(self).__name__, self.sources()[0].dtype)
        self.check_finite()

    def _compute(self, size: Pair, *sources: Tensor) -> Tensor:
        with full_precision(sources[0]):
            return self.operator(size, *sources)

    def remembered(self, key: Hashable, sources: tuple[Tensor, ...], compute: Callable[..., Tensor]) -> Tensor:
        """Return `compute` of the sources, from memory if it has a value of that key for these very sources."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(sources[0]):
            memory = self._recall(sources)
            if (value := memory.find(key)) is None:
                value = compute(*memory.snapshot)
                memory = memory.add(key, value)
            self._memory = memory
            return value

    def remembered_number(self, key: Hashable, sources: tuple[Tensor, ...], compute: Callable[..., Tensor]) -> float:
        """`remembered` for a tensor of one number, which takes no room from the operators."""
        with torch.inference_mode(False), torch.no_grad(), full_precision(sources[0]):
            memory = self._recall(sources)
            if key not in memory.numbers:
                memory = memory._replace(numbers={**memory.numbers, key: compute(*memory.snapshot).item()})
            self._memory = memory
            return memory.numbers[key]

    def _recall(self, sources: tuple[Tensor, ...]) -> _Memory:
        """Return the memory, or an empty one if settings or sources are not those that it was computed from."""
        memory, settings = self._memory, self._settings()
        stamp = _stamp_of(sources) if self._frozen else None
        known = stamp is not None and memory.stamp is not None and stamp.state == memory.stamp.state
        if settings != memory.settings or not (known or _equal(memory.snapshot, sources)):
            self.check_finite()
            memory = _Memory(settings, tuple(source.detach().clone() for source in sources))
        return memory._replace(stamp=stamp)

    def _settings(self) -> dict[str, Any]:
        """Plain attributes, some of which enter the operator, and the class, which may be replaced."""
        plain = (int, float, str, tuple, Geometry)
        own = {k: v for k, v in vars(self).items() if k[0] != "_" and k != "training" and isinstance(v, plain)}
        return {**own, "__class__": type(self)}

    def check_finite(self) -> None:
        """Raise a ValueError if a source has entries that are not finite, where looking at them is cheap."""
        sources = self.sources()
        if not is_concrete(*sources) or not (self.remembers or sources[0].device.type == "cpu"):
            return
        for source in sources:
            if not math.isfinite(norm := torch.linalg.vector_norm(source.detach()).item()):
                names = [k for k, v in (*self.named_parameters(), *self.named_buffers()) if v is source]
                bad = int((~torch.isfinite(source)).sum())
                raise ValueError(
                    f"{type(self).__name__} needs finite weights: {' '.join(names) or 'a weight'} has norm "
                    f"{norm}, with {bad} non-finite of {source.numel()} entries"
                )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as torch does; add what to do, if the state dict is that of a plain layer and does not fit."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        _, _, missing, _, errors = args
        names = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        mismatched = any(f"{prefix}weight:" in error for error in errors)
        lacking = sorted(key.removeprefix(prefix) for key in missing if key.startswith(prefix))
        if {"weight"} <= names <= {"weight", "bias"} and (mismatched or set(lacking) - {"bias"}):
            kind, plain = type(self).__name__, self.replaces.__name__
            maker = "from_linear" if self.replaces is nn.Linear else "from_conv"
            errors.append(
                f"{prefix}weight looks like that of an nn.{plain}, which is not what a {kind} is computed from"
                f"{'; that has ' * bool(lacking)}{', '.join(lacking)}. Load it into an nn.{plain}, and make the layer "
                f"from that: orthoconv.orthogonal(layer, keep_weights=True), or {kind}.{maker}"
            )

    def train(self, mode: bool = True) -> "Reparametrized":
        if mode:
            self._memory = _Memory()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": _Memory(), "_frozen": 0}


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Compute the operator of each layer of `model` once per image size, and reuse it inside the context.

    Eval mode does this by itself.

    Arguments:
        model: Any module; only layers of this library in it compute operators.

    >>> layer = nn.Identity()
    >>> with frozen(layer):
    ...     y = layer(torch.ones(2))
    """
    layers = [m for m in model.modules() if isinstance(m, Reparametrized)]
    _stamp_equal([layer for layer in layers if not layer._frozen])
    for layer in layers:
        layer._frozen += 1
    try:
        yield model
    finally:
        for layer in layers:
            layer._frozen -= 1
            if not layer._frozen:
                layer._memory = _Memory() if layer.training else layer._memory._replace(stamp=None)


def _equal(snapshot: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> bool:
    """Whether all entries are equal; on an accelerator, all are compared before the host waits."""
    if not _alike(snapshot, sources):
        return False
    if all(budget.has_cache(source.device) for source in sources):
        return all(torch.equal(a, b) for a, b in zip(snapshot, sources, strict=True))
    return not bool(_differ(snapshot, sources))


def _alike(snapshot: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> bool:
    pairs = list(zip(snapshot, sources, strict=False))
    kinds = all(a.dtype == b.dtype and a.device == b.device and a.shape == b.shape for a, b in pairs)
    return len(snapshot) == len(sources) and kinds


def _differ(snapshot: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> Tensor:
    """Whether any entries differ, as a tensor on the device."""
    return torch.stack([(a != b).any() for a, b in zip(snapshot, sources, strict=True)]).any()


class _Stamp:
    """Tensors on an accelerator, which are kept alive, and what changes when they are edited."""

    def __init__(self, sources: tuple[Tensor, ...]) -> None:
        self.sources = sources
        self.state = [(id(source), source.data_ptr(), source._version) for source in sources]


def _stamp_of(sources: tuple[Tensor, ...]) -> _Stamp | None:
    """Return the stamp of tensors on an accelerator; None on a CPU, where entries are compared instead."""
    seen = not any(budget.has_cache(source.device) or source.is_inference() for source in sources)
    return _Stamp(sources) if seen else None


@torch.no_grad()
def _stamp_equal(layers: Sequence[Reparametrized]) -> None:
    """Compare what layers on accelerators remember with their tensors; the host waits once for each device."""
    by_device: dict[torch.device, list[tuple[Reparametrized, Tensor]]] = {}
    for layer in layers:
        snapshot = layer._memory.snapshot
        sources = layer.sources() if snapshot else ()
        if sources and is_concrete(*sources) and _stamp_of(sources) and _alike(snapshot, sources):
            by_device.setdefault(sources[0].device, []).append((layer, _differ(snapshot, sources)))
    for pairs in by_device.values():
        for (layer, _), differs in zip(pairs, torch.stack([d for _, d in pairs]).cpu().tolist(), strict=True):
            layer._memory = layer._memory._replace(stamp=None if differs else _stamp_of(layer.sources()))
