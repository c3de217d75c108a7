"""Singular value clipping (SVCM).

Sedghi, Gupta and Long, The Singular Values of Convolutional Layers, ICLR 2019.
"""

__all__ = ["SVCMConv2d"]

from typing import Literal

import torch
from torch import Tensor

from orthoconv import fourier
from orthoconv.nn.arguments import Pair
from orthoconv.nn.kernel import WeightConv2d
from orthoconv.nn.methods import register_method


class SVCMConv2d(WeightConv2d):
    """Plain circular convolution with a method that projects its kernel towards the orthogonal ones.

    `project` alternates between two sets: convolutions whose singular values are all 1 (or at most 1), and those with
    k x k taps. The training loop calls it from time to time; between calls, and where the alternation has not
    converged, the layer guarantees nothing, and `lipschitz_bound` says what its norm is.

    Arguments are those of `BaseConv2d`, and

        mode: "orthogonal" to make all singular values 1, "clip" to make them at most 1.
        identity: Whether the weight starts as the identity kernel; otherwise as that of nn.Conv2d.

    Shape:
        (b, in_channels, h, w) or (in_channels, h, w), to (b, out_channels, h / stride, w / stride).

    >>> layer = SVCMConv2d(8, 8, 1)
    >>> layer.project(size=(4, 4))
    >>> round(layer.singular_values((4, 4)).max().item(), 5)
    1.0
    """

    def set_up(self, *, mode: Literal["orthogonal", "clip"] = "orthogonal", identity: bool = False) -> None:
        if mode not in ("orthogonal", "clip"):
            raise ValueError(f'mode must be "orthogonal" or "clip", got {mode!r}')
        super().set_up(identity=identity)
        self.mode = mode
        self._last_size: Pair | None = None

    def operator(self, size: Pair, *sources: Tensor) -> Tensor:
        return sources[0]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self._last_size = self.geometry.inner_size(x.shape[-2:])
        return y

    @torch.no_grad()
    def project(self, iterations: int = 1, size: Pair | None = None) -> None:
        """Replace the kernel by its projection, so many times back and forth.

        Arguments:
            iterations: Number of alternations; one is enough for a kernel of one tap.
            size: Size of the layer's input images; by default that of the last forward pass.
        """
        inner = self._last_size if size is None else self.geometry.inner_size(size)
        if inner is None:
            raise ValueError("project needs the size of the images: call the layer once before, or pass size=(h, w)")
        for _ in range(iterations):
            D = fourier.spectrum(self.weight, inner, dilation=self.dilation, groups=self.groups)
            U, values, V = torch.linalg.svd(D, full_matrices=False)
            target = U @ V if self.mode == "orthogonal" else (U * values.clamp(max=1)[..., None, :]) @ V
            self.weight.copy_(fourier.nearest_kernel(target, inner, self.geometry.taps, dilation=self.dilation))


register_method("svcm", conv=SVCMConv2d, linear="bjorck")
