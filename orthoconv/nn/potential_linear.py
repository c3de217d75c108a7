"""Blocks x - U^T relu(U x + b) of vectors."""

__all__ = ["PotentialLinear"]

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.linalg import frobenius_norm
from orthoconv.nn.arguments import check_dtype, check_tensor, positive_int
from orthoconv.nn.plain import owned
from orthoconv.nn.potential import Potential, block_units, half_of, lipschitz_constant
from orthoconv.products import product
from orthoconv.tracing import full_precision


class PotentialLinear(Potential):
    """`Potential` whose U is a matrix, with the arguments of `nn.Linear`; abstract. It is not a linear map.

    Arguments:
        in_features: Entries of an input.
        out_features: Entries of an output.
        bias: Whether the block has a learnable bias b.
        device: Device of the parameters.
        dtype: Precision of the parameters.
        hidden: Rows of U; by default half the smaller of in_features and out_features, rounded up.
        identity: Whether a learned gate multiplies the step, and starts almost closed, as in `PotentialConv2d`.

    Shape:
        (..., in_features), to (..., out_features).

    >>> from orthoconv.nn import SLLLinear
    >>> layer = SLLLinear(4, 4)
    >>> isinstance(layer, PotentialLinear), layer.guarantee
    (True, 'nonexpansive')
    """

    replaces: ClassVar[type[nn.Module]] = nn.Linear
    depends_on_size: ClassVar[bool] = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.check_arguments(bias, dtype, options)
        self.in_features = positive_int("in_features", in_features)
        self.out_features = positive_int("out_features", out_features)
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._biased = bias
        self.set_up(**options)
        self.reset_parameters()

    def set_up(self, *, hidden: int | None = None, identity: bool = False) -> None:
        i, o = self.in_features, self.out_features
        self.hidden = positive_int("hidden", half_of(min(i, o)) if hidden is None else hidden)
        self.weight = self.new_parameter(self.hidden, max(i, o))
        self.register_parameter("bias", self.new_parameter(self.hidden) if self._biased else None)
        super().set_up(identity=identity)

    def forward(self, x: Tensor) -> Tensor:
        name = type(self).__name__
        check_tensor(name, x)
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"{name} takes inputs of shape (..., {self.in_features}), got {tuple(x.shape)}")
        x = check_dtype(name, x, self.weight.dtype)
        with full_precision(x):
            return _step(x, self.cached_operator(), self.bias, self.out_features)

    def in_double(self) -> nn.Module:
        return self.exported().double()

    def lipschitz(self, shape: Sequence[int] = ()) -> float:
        return lipschitz_constant(self.cached_operator())

    def rounding_units(self, shape: Sequence[int] = ()) -> float:
        return block_units(self.cached_operator()[..., None, None])

    def constants(self, shape: Sequence[int] = ()) -> float:
        return 0.0 if self.bias is None else frobenius_norm(self.bias) * math.sqrt(math.prod(shape[:-1]))

    def exported(self, shape: Sequence[int] = ()) -> nn.Module:
        return _PlainStep(self.cached_operator(), self.bias, self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, hidden={self.hidden}, "
            f"bias={self.bias is not None}"
        )


def _step(x: Tensor, U: Tensor, bias: Tensor | None, o: int) -> Tensor:
    """The block on vectors (..., i), by a matrix U (r, max(i, o))."""
    i = x.shape[-1]
    h = product(x, U[:, :i].mT)
    h = F.relu(h if bias is None else h + bias)
    kept = x[..., :o] if o <= i else F.pad(x, (0, o - i))
    return kept - product(h, U[:, :o])


class _PlainStep(nn.Module):
    """The block on vectors, by a fixed matrix."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, U: Tensor, bias: Tensor | None, o: int) -> None:
        super().__init__()
        self.out_features = o
        self.register_buffer("weight", owned(U))
        self.register_buffer("bias", None if bias is None else owned(bias))

    def forward(self, x: Tensor) -> Tensor:
        return _step(x, self.weight, self.bias, self.out_features)
