"""Layers and functions with 160 channels after `torch.set_num_threads(2)`: what test_elimination.py runs."""

import torch

from orthoconv import elimination, fourier
from orthoconv.nn import CayleyConv2d

SIZE = (4, 4)


def check_layer(layer: CayleyConv2d, batch: int) -> None:
    """Training, eval and gradients keep norms."""
    x = torch.randn(batch, layer.in_channels, *SIZE, requires_grad=True)
    for mode in (True, False):
        y = layer.train(mode)(x)
        torch.testing.assert_close(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1), rtol=1e-4, atol=0)
        (back,) = torch.autograd.grad(y, x, y)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-4)


def check_functions() -> None:
    """`inverse_conv2d` and `logabsdet` against single matrices in float64."""
    weight, y = torch.randn(160, 160, 3, 3) / 40, torch.randn(2, 160, *SIZE)
    weight[..., 1, 1] += 2 * torch.eye(160)
    double = weight.double()
    x = fourier.inverse_conv2d(y.double(), double)
    D = fourier.spectrum(double, SIZE)
    torch.testing.assert_close(fourier.spectral_conv2d(x, D), y.double())
    torch.testing.assert_close(fourier.inverse_conv2d(y, weight).double(), x, rtol=0, atol=1e-3)
    whole = torch.stack([torch.linalg.slogdet(d).logabsdet for d in D[0]]).view(SIZE[0], SIZE[1] // 2 + 1)
    expected = whole[:, 0].sum() + 2 * whole[:, 1].sum() + whole[:, 2].sum()  # the rest are conjugates
    torch.testing.assert_close(fourier.logabsdet(double, SIZE), expected)
    torch.testing.assert_close(fourier.logabsdet(weight, SIZE).double(), expected, rtol=1e-4, atol=0)


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.manual_seed(0)
    square = CayleyConv2d(160, 160, 3, bias=False)
    check_layer(square, 170)  # by the inverse
    check_layer(square, 8)  # by the factors: channels exceed the batch
    check_layer(CayleyConv2d(320, 320, 3, groups=2, bias=False), 8)
    check_functions()
    M = torch.randn(4, 160, 160, dtype=torch.complex128)
    R = torch.func.vmap(elimination.inverse)(M)  # each looks like a single matrix
    torch.testing.assert_close(M @ R, torch.eye(160, dtype=M.dtype).expand(M.shape))
