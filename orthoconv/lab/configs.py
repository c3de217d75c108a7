"""What a run is trained from, and the digest that identifies it."""

__all__ = ["ModelSpec", "Training", "digest", "list_methods_in_help", "load_methods"]

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cache, reduce
from importlib.metadata import entry_points
from typing import Any, Literal

from orthoconv.data.resizing import Size, size_of
from orthoconv.models import NETWORKS, default_conv
from orthoconv.nn import conv_methods, linear_methods
from orthoconv.train import Recipe

_YOUNGER = {
    "learned_scale": True,
    "head": None,
    "depth": None,
    "layers": None,
    "members": 1,
    "mirror": False,
    "identity": False,
    "padding_mode": "circular",
}  # fields that older records of networks lack, and the value that they then had
_YOUNGER_OPTIONS = {"resize": None, "split": None, "data_seed": 0, "start": None}  # the same of whole configurations
_OPTIONS = ("examples", *_YOUNGER_OPTIONS)


@dataclass(frozen=True)
class ModelSpec:
    """Arguments of `orthoconv.models.build` that do not depend on the data.

    Attributes:
        name: NETWORKS; or custom, with layers.
        conv: Method of the convolutions: CONVS; by default cayley, and lires for liresnet.
        linear: Method of the linear layers: LINEARS; by default the one that goes with the convolutions.
        width: Factor of the numbers of channels.
        kernel_size: Taps of the convolutions.
        strided_kernel_size: Taps of the strided convolutions of kwlarge.
        lipschitz: Lipschitz bound of the network, if its methods guarantee norms of at most 1.
        learned_scale: Whether the scale g of Cayley layers is trained.
        normalize: Whether the first layer subtracts the mean of the training images (center), divides by their
            standard deviation as well (standardize), or does neither (none).
        head: Method of the last linear layer: LINEARS; by default that of the other linear layers.
        depth: Convolutions of lipconvnet, or of the body of liresnet.
        layers: The layers of a network of one's own, such as [conv 32 k3 s2, maxmin, flatten, linear 64, maxmin, head].
        members: Number of networks, trained from one seed after the other, whose mean the model is.
        mirror: Whether the model is the mean over an image and its mirror image; it is trained without.
        identity: Whether layers with as many outputs as inputs start as the identity.
        padding_mode: Padding of the convolutions: circular or zeros.
    """

    name: str = "kwlarge"
    conv: str | None = None
    linear: str | None = None
    width: float = 1
    kernel_size: int = 3
    strided_kernel_size: int | None = None
    lipschitz: float = 1.0
    learned_scale: bool = True
    normalize: Literal["none", "center", "standardize"] = "center"
    head: str | None = None
    depth: int | None = None
    layers: list[str | dict[str, Any]] | None = None
    members: int = 1
    mirror: bool = False
    identity: bool = False
    padding_mode: Literal["circular", "zeros"] = "circular"

    def __post_init__(self) -> None:
        if self.layers is not None and self.name not in ("kwlarge", "custom"):
            raise ValueError(f"layers are given, so name must be 'custom' or left out, got {self.name!r}")
        object.__setattr__(self, "name", self.name if self.layers is None else "custom")
        object.__setattr__(self, "conv", default_conv(self.name) if self.conv is None else self.conv)


_HELP = ModelSpec.__doc__ or ""


def list_methods_in_help() -> None:
    """Name the methods that are registered now in the help text of --model.conv."""
    lists = {"NETWORKS": NETWORKS, "CONVS": conv_methods(), "LINEARS": linear_methods()}
    ModelSpec.__doc__ = reduce(lambda text, key: text.replace(key, ", ".join(lists[key])), lists, _HELP)


@cache
def load_methods() -> None:
    """Import what other packages name in the entry point group orthoconv.methods, so that it registers its methods."""
    for entry in entry_points(group="orthoconv.methods"):
        try:
            entry.load()
        except Exception as error:  # whatever a module of strangers raises
            raise ImportError(f"the method {entry.name} ({entry.value}) cannot be loaded: {error!r}") from error


@dataclass(frozen=True)
class Training:
    """Everything that the weights of a run depend on.

    Attributes:
        data: Data set.
        model: The network.
        recipe: How it is trained. Without a `lipschitz` of its own, the margin is that of the network's bound.
        examples: Training images, the first ones; 0 for all. Images of one's own are in a random order, by `data_seed`,
            in which any first ones have all classes about as often as the whole.
        resize: Size to give the images; by default they keep theirs.
        split: Share of one's own images that are test images, if they are not divided already; 0.2 by default.
        data_seed: Seed of that division, and of the order of one's own images.
        start: Network whose weights training begins with: folder of a run, file of weights, or name of a network of the
            package. Behind a mean of networks, #0, #1, ... is one of them; the members of a mean begin with those.
    """

    data: str
    model: ModelSpec = field(default_factory=ModelSpec)
    recipe: Recipe = field(default_factory=Recipe)
    examples: int = 0
    resize: Size | None = None
    split: float | None = None
    data_seed: int = 0
    start: str | None = None

    def __post_init__(self) -> None:
        if self.examples < 0:
            raise ValueError(f"examples must be at least 0, got {self.examples}")
        if self.split is not None and not 0 < self.split < 1:
            raise ValueError(f"split must be between 0 and 1, got {self.split}")
        if type(self.data_seed) is not int:
            raise ValueError(f"data_seed must be a whole number, got {self.data_seed!r}")
        if self.resize is not None:
            object.__setattr__(self, "resize", size_of(self.resize))
        if self.recipe.lipschitz is None:
            object.__setattr__(self, "recipe", replace(self.recipe, lipschitz=self.model.lipschitz))

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Training":
        """Read a configuration, complete or not; fields that the weights do not depend on are ignored."""
        model, recipe = ModelSpec(**config.get("model", {})), Recipe(**config.get("recipe", {}))
        return cls(config["data"], model, recipe, **{k: config[k] for k in _OPTIONS if k in config})

    @property
    def config(self) -> dict[str, Any]:
        """The complete configuration."""
        model = {k: v for k, v in asdict(self.model).items() if k not in _YOUNGER or v != _YOUNGER[k]}
        own = {k: getattr(self, k) for k, v in _YOUNGER_OPTIONS.items() if getattr(self, k) != v}
        return {"data": self.data, "examples": self.examples, **own, "model": model, "recipe": self.recipe.settings}

    @property
    def reading(self) -> dict[str, Any]:
        """How `orthoconv.data.load` reads the images."""
        return {"resize": self.resize, "split": self.split, "seed": self.data_seed}

    @property
    def hash(self) -> str:
        """What identifies a run in its folder, its record and its card."""
        return digest(self.config)


def digest(config: dict[str, Any]) -> str:
    """Return the digest of a configuration. The numbers 1 and 1.0 are the same.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1.0})
    True
    """
    return hashlib.sha256(json.dumps(_canonical(config), sort_keys=True).encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
