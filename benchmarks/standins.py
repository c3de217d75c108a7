"""Layers that are only said to have the norm 1: to try the conversion of large networks quickly."""

__all__ = ["NAME"]

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import register_rule
from orthoconv.nn import register_method
from orthoconv.nn.arguments import pair

NAME = "standin"


class StandInConv2d(nn.Module):
    """A plain convolution, padded by zeros to (h, w) / stride."""

    def __init__(
        self,
        i: int,
        o: int,
        kernel_size: Any,
        *,
        stride: Any,
        dilation: Any,
        groups: int,
        bias: bool,
        padding_mode: str,
    ) -> None:
        super().__init__()
        self.stride, self.dilation, self.groups = pair("stride", stride), pair("dilation", dilation), groups
        k = pair("kernel_size", kernel_size)
        spans = [d * (n - 1) for d, n in zip(self.dilation, k, strict=True)]
        self.padding = (spans[1] // 2, spans[1] - spans[1] // 2, spans[0] // 2, spans[0] - spans[0] // 2)
        fan = i // groups * k[0] * k[1]
        self.weight = nn.Parameter(torch.randn(o, i // groups, *k) / fan**0.5)
        self.bias = nn.Parameter(torch.zeros(o)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        x = F.pad(x, self.padding)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class StandInLinear(nn.Module):
    """A plain linear layer."""

    def __init__(self, i: int, o: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i) / i**0.5)
        self.bias = nn.Parameter(torch.zeros(o)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(x, self.weight, self.bias)


register_method(NAME, conv=StandInConv2d, linear=StandInLinear)
register_rule(StandInConv2d, StandInLinear, lipschitz=1.0, rounding=1.0)
