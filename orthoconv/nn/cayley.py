"""Orthogonal layers by the Cayley transform.

Trockman and Kolter, Orthogonalizing Convolutional Layers with the Cayley Transform, ICLR 2021.
"""

__all__ = ["CayleyConv2d", "CayleyConvTranspose2d", "CayleyLinear"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv.linalg import cayley, cayley_linear
from orthoconv.nn.base import Padding, check_dtype, check_positive
from orthoconv.nn.memory import Pair, Reparametrized, full_precision
from orthoconv.nn.spectral import Signs, SpectralConv2d, check_signs, weight_norm


class CayleyConv2d(SpectralConv2d):
    r"""Orthogonal convolution: the Cayley transform of a circular convolution (Algorithm 1).

    Takes the place of ``nn.Conv2d(..., padding="same", padding_mode="circular")``, with its arguments in their
    order, on images of any size. It keeps the norm of its input if ``in_channels * stride**2 <= out_channels``,
    and never increases it. The kernel before the transform is :math:`g V / \|V\|`.

    Arguments:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Taps of the kernel before the transform, an int or a pair; after it, the whole image.
        stride: Int or pair that divides the image. Blocks of pixels become channels, and ``max(1, k // stride)``
            taps mix them.
        padding: "same", or the ints with which nn.Conv2d returns an image of the same size.
        dilation: Distance of the taps, an int or a pair.
        groups: Number of blocks of channels, each orthogonal by itself.
        bias: Whether to add a learnable bias.
        padding_mode: "circular".
        signs: Fixed signs of the input channels, after downsampling, that multiply the transform: None for none,
            "random", or a sequence of 1 and -1. Without them no operator has the eigenvalue -1 (Section 4.1).

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> layer = CayleyConv2d(3, 16, 3)
    >>> x = torch.randn(8, 3, 32, 32)
    >>> y = layer(x) - layer(torch.zeros_like(x))
    >>> round((y.norm() / x.norm()).item(), 5)
    1.0
    """

    orthogonalize = staticmethod(cayley)


class CayleyConvTranspose2d(SpectralConv2d):
    """Adjoint of the `CayleyConv2d` of the same weight from `out_channels` to `in_channels`.

    Takes the place of `nn.ConvTranspose2d`, with its arguments in their order; the image grows by `stride`.

    >>> down, up = CayleyConv2d(3, 12, 3, stride=2, bias=False), CayleyConvTranspose2d(12, 3, 3, stride=2, bias=False)
    >>> _ = up.load_state_dict(down.state_dict())
    >>> x = torch.randn(1, 3, 8, 8)
    >>> torch.dist(up(down(x)), x).item() < 1e-5
    True
    """

    transposed = True
    orthogonalize = staticmethod(cayley)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "same",
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Sequence[int] = 1,
        padding_mode: str = "circular",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        signs: Signs = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device, dtype, signs=signs,
        )  # fmt: skip
        self.output_padding = self._check_output_padding(output_padding)

    def _check_output_padding(self, value: int | Sequence[int]) -> Pair:
        """Accept what makes nn.ConvTranspose2d multiply each side by the stride; nothing with "same"."""
        expected = (0, 0)
        if self.padding != "same":
            axes = zip(self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
            rows, columns = (s - 1 - d * (k - 1) + 2 * p for k, s, p, d in axes)
            expected = (rows, columns)
        if value not in (expected, list(expected)) and (value, value) != expected:
            raise ValueError(
                f"output_padding must be {expected} with kernel_size={self.kernel_size}, stride={self.stride}, "
                f"padding={self.padding!r}, dilation={self.dilation}; got {value!r}"
            )
        return expected


class CayleyLinear(Reparametrized):
    """Orthogonal linear layer: the Cayley transform of g V / |V|, in place of `nn.Linear`.

    It keeps the norm of its input if ``in_features <= out_features``, and never increases it.

    >>> layer = CayleyLinear(512, 10)
    >>> layer(torch.randn(2, 512)).shape
    torch.Size([2, 10])
    """

    bias: nn.Parameter | None
    signs: Tensor | None

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
        super().__init__()
        check_positive(in_features=in_features, out_features=out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.g = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.register_buffer("signs", check_signs(signs, in_features, self.weight))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PyTorch's initialisation of a linear layer; g = |V|, so that the matrix starts as V."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.constant_(self.g, torch.linalg.vector_norm(self.weight.detach()))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def kernel(self) -> Tensor:
        """The matrix before the transform, g V / |V|."""
        return weight_norm(self.weight, self.g)

    def sources(self) -> tuple[Tensor, ...]:
        return (self.weight, self.g) if self.signs is None else (self.weight, self.g, self.signs)

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        V, g, *signs = sources
        Q = cayley(weight_norm(V, g))
        return Q * signs[0] if signs else Q

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"CayleyLinear takes inputs of shape (..., {self.in_features}), got {tuple(x.shape)}")
        x = check_dtype("CayleyLinear", x, self.weight.dtype)
        with full_precision(x):
            rows = x.numel() // self.in_features
            if self.remembers or rows >= self.in_features - self.out_features:
                return F.linear(x, self.recall(), self.bias)
            self.check_finite()  # what follows is the same product, without forming the matrix
            y = cayley_linear(x if self.signs is None else x * self.signs, self.kernel)
            return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
