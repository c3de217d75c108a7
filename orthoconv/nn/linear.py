"""Orthogonal linear layers, by the Cayley transform and by Bjorck's iteration (Anil et al., 2019)."""

__all__ = ["BjorckLinear", "CayleyLinear"]

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.linalg import bjorck, cayley, cayley_linear
from orthoconv.nn.base import check_dtype, positive_int
from orthoconv.nn.memory import Pair, Reparametrized
from orthoconv.nn.weight_norm import Signs, WeightNormed, weight_norm
from orthoconv.tracing import full_precision, is_eager


class BaseLinear(Reparametrized):
    """Linear layer with the arguments of `nn.Linear`, whose matrix is computed from `weight`; abstract."""

    depends_on_size: ClassVar[bool] = False
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = positive_int("in_features", in_features)
        self.out_features = positive_int("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    def reset_bias(self) -> None:
        """PyTorch's initialisation of the bias of a linear layer."""
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        name = type(self).__name__
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"{name} takes inputs of shape (..., {self.in_features}), got {tuple(x.shape)}")
        x = check_dtype(name, x, self.weight.dtype)
        with full_precision(x):
            return self.apply_matrix(x)

    def apply_matrix(self, x: Tensor) -> Tensor:
        """Product with the matrix, and the bias."""
        return F.linear(x, self.recall(), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class CayleyLinear(BaseLinear, WeightNormed):
    """Orthogonal linear layer: the Cayley transform of g V / |V|, in place of `nn.Linear`.

    It keeps the norm of its input if ``in_features <= out_features``, and never increases it. `signs` are fixed signs
    of the inputs, as in `CayleyConv2d`.

    >>> layer = CayleyLinear(512, 10)
    >>> layer(torch.randn(2, 512)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        signs: Signs = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.add_scale(signs, self.in_features)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        V, g, *signs = sources
        Q = cayley(weight_norm(V, g))
        return Q * signs[0] if signs else Q

    def apply_matrix(self, x: Tensor) -> Tensor:
        excess = self.in_features - self.out_features
        accurate = excess == 0 or excess >= self.out_features  # see `cayley_linear`
        if self.remembers or not accurate or not is_eager(x, *self.sources()):
            return super().apply_matrix(x)
        self.check()  # what follows is the same product, without forming the matrix
        rows = (x if self.signs is None else x * self.signs).reshape(-1, self.in_features)
        y = cayley_linear(rows, self.weight, self.g).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class BjorckLinear(BaseLinear):
    """Orthogonal linear layer: the orthogonal matrix nearest to `weight`, by Bjorck's iteration.

    >>> BjorckLinear(512, 10)
    BjorckLinear(in_features=512, out_features=10, bias=True)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        iterations: int = 20,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.iterations = positive_int("iterations", iterations)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthogonal, as in the BCOP paper."""
        nn.init.orthogonal_(self.weight)
        self.reset_bias()

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return bjorck(sources[0], self.iterations)
