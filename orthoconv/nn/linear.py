"""The base of every linear layer whose matrix is computed from parameters."""

__all__ = ["BaseLinear"]

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.linalg import frobenius_norm, spectral_norm
from orthoconv.nn.arguments import check_dtype, check_tensor, flag, positive_int
from orthoconv.nn.identity import identity_
from orthoconv.nn.origins import remade
from orthoconv.nn.plain import owned
from orthoconv.nn.reparametrized import Reparametrized
from orthoconv.products import product
from orthoconv.tracing import full_precision, is_eager

L = TypeVar("L", bound="BaseLinear")
_NOT_ORTHOGONAL = 1e-3  # by which the squares of the singular values may miss their number, if there is an inverse
_ROUNDED = 2e-5  # by which rounding in float32 may change the square of one


class BaseLinear(Reparametrized):
    """Linear layer with the arguments of `nn.Linear`, whose matrix is computed from `weight`; abstract.

    Arguments:
        in_features: Entries of an input.
        out_features: Entries of an output.
        bias: Whether to add a learnable bias.
        device: Device of the parameters.
        dtype: Precision of the parameters.
        identity: Whether the matrix starts as the identity, up to what the method adds: a scale for `FrobeniusLinear`,
            signs for `BROLinear`. More inputs than outputs take turns. Otherwise it is random.

    Shape:
        (..., in_features), to (..., out_features).

    >>> class Negated(BaseLinear):
    ...     def operator(self, size, *sources):
    ...         return -sources[0]
    >>> Negated(3, 2)(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    replaces: ClassVar[type[nn.Module]] = nn.Linear
    depends_on_size: ClassVar[bool] = False
    weight: nn.Parameter
    bias: nn.Parameter | None
    reduced: bool = False  # whether it multiplies in bfloat16 in training mode, see `modules.reduced_products`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        identity: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.check_arguments(bias, dtype, options)
        self.in_features = positive_int("in_features", in_features)
        self.out_features = positive_int("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, device=device, dtype=dtype))
        room = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", room)
        self.identity = flag("identity", identity)
        self.set_up(**options)
        self.reset_parameters()

    @classmethod
    def from_linear(cls: type[L], linear: nn.Linear, *, keep_weights: bool = False, **options: Any) -> L:
        """Return the layer of this class that takes the place of an nn.Linear; see `orthogonal`.

        >>> from orthoconv.nn import QRLinear
        >>> QRLinear.from_linear(nn.Linear(3, 8))
        QRLinear(in_features=3, out_features=8, bias=True)
        """
        if not isinstance(linear, cls.replaces):
            raise TypeError(f"{cls.__name__} takes the place of nn.{cls.replaces.__name__}, got {linear!r}")
        return remade(linear, cls, keep_weights=keep_weights, **options)  # type: ignore[return-value]

    @torch.no_grad()
    def start_from(self, matrix: Tensor) -> None:
        """Start from the matrix (out_features, in_features) of a plain layer, if `weight` is such a matrix."""
        if self.weight.shape != matrix.shape:
            raise ValueError(
                f"{type(self).__name__} cannot start from a matrix (keep_weights=True): its weight is another, "
                f"{tuple(self.weight.shape)}. Methods such as cayley, polar, bjorck can"
            )
        self.weight.copy_(matrix)

    def reset_bias(self) -> None:
        """Initialise the bias as PyTorch does for a linear layer."""
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def reset_parameters(self) -> None:
        """Initialise an orthogonal weight, or the identity."""
        nn.init.orthogonal_(self.weight)
        if self.identity:
            identity_(self.weight)
        self.reset_bias()

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def lipschitz(self, shape: Sequence[int] = ()) -> float:
        return spectral_norm(self.cached_operator())

    def singular_values_for(self, shape: Sequence[int]) -> Tensor:
        return self.singular_values()

    def singular_values(self) -> Tensor:
        """All singular values of the matrix in the layer's own precision, found in float64."""
        values: Tensor = torch.linalg.svdvals(self.cached_operator().detach().double())
        return values

    def rounding_units(self, shape: Sequence[int] = ()) -> float:
        return (self.in_features + 1) * frobenius_norm(self.cached_operator())

    def in_double(self) -> nn.Module:
        return self.exported(()).double()

    def exported(self, shape: Sequence[int] = ()) -> nn.Module:
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        plain.weight = nn.Parameter(owned(self.cached_operator()), requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(owned(self.bias), requires_grad=False)
        return plain

    def forward(self, x: Tensor) -> Tensor:
        x = self._check_input(x, self.in_features)
        with full_precision(x):
            if self.reduced and self.training and x.dtype == torch.float32:
                return self._apply_in_bfloat16(x)
            return self.apply_matrix(x)

    def inverse(self, y: Tensor) -> Tensor:
        """Return the x for which an orthogonal layer returns `y`: the inverse of an isometry is its transpose.

        With more outputs than inputs it is the left inverse: `y` is projected on the range of the layer. Weights of
        lower rank may make a layer of some methods, such as `PolarLinear`, lose inputs: that is an error. It is looked
        for in the norm of the matrix, except where torch traces or transforms.
        """
        i, o = self.in_features, self.out_features
        if i > o or self.promise != "orthogonal":
            reason = f"maps {i} features to {o}" if self.promise == "orthogonal" else "is not orthogonal"
            raise ValueError(f"{type(self).__name__} {i} -> {o} has no inverse: it {reason}")
        y = self._check_input(y, o)
        with full_precision(y):
            Q = self.cached_operator()
            self._require_isometry(Q)
            return product(y if self.bias is None else y - self.bias, Q)

    def _require_isometry(self, Q: Tensor) -> None:
        """Raise an error if the squares of the singular values, none of which exceeds 1, do not add up to their number.

        Rounding may change each of them by `_ROUNDED`.
        """
        if not is_eager(Q):
            return
        i, found = self.in_features, frobenius_norm(Q.detach()) ** 2
        if not abs(found - i) <= _NOT_ORTHOGONAL + _ROUNDED * i:
            raise ValueError(
                f"{type(self).__name__} has no inverse with these weights: the squares of its {i} singular values add "
                f"up to {found:.6g}. Do they have full rank?"
            )

    def _check_input(self, x: Tensor, features: int) -> Tensor:
        """Return `x` in the layer's own precision, or raise an error that says what is wrong with it."""
        name = type(self).__name__
        check_tensor(name, x)
        if x.ndim < 1 or x.shape[-1] != features:
            raise ValueError(f"{name} takes inputs of shape (..., {features}), got {tuple(x.shape)}")
        return check_dtype(name, x, self.weight.dtype)

    def _apply_in_bfloat16(self, x: Tensor) -> Tensor:
        """Compute the matrix in the layer's own precision, and multiply by it in bfloat16."""
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.cached_operator().bfloat16(), bias)

    def apply_matrix(self, x: Tensor) -> Tensor:
        """Multiply by the matrix, and add the bias."""
        y = product(x, self.cached_operator().mT)
        return y if self.bias is None else y + self.bias

    def apply_unformed(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], of: type["BaseLinear"]) -> Tensor:
        """`apply_matrix` by a function that need not form the matrix, unless the matrix is remembered.

        Arguments:
            x: Inputs.
            multiply: Function of rows and of `weight` that gives the same as the matrix.
            of: Class whose matrix that is; a subclass with another matrix multiplies by its own.
        """
        if self.remembers or not self.has_matrix_of(of):
            return BaseLinear.apply_matrix(self, x)
        self.check()
        y = multiply(x, self.weight)
        return y if self.bias is None else y + self.bias

    def has_matrix_of(self, kind: type["BaseLinear"]) -> bool:
        """Whether `operator` and `sources` are those of a class, and neither a subclass nor this layer has its own.

        Arguments:
            kind: The class.
        """
        return all(getattr(getattr(self, f), "__func__", None) is getattr(kind, f) for f in ("operator", "sources"))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
