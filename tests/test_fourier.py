import pytest
import torch
from oracles import conv_matrix, grouped
from torch import Tensor, nn

from orthoconv import fourier

SIZES = [(4, 4), (5, 4), (4, 7), (3, 5), (1, 6), (7, 1), (1, 1), (2, 2)]
KERNELS = [(1, 1), (3, 3), (2, 2), (4, 3), (5, 1), (9, 8)]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (6, 11)])
@pytest.mark.parametrize("k", [1, 2, 3, 4, (3, 2)])
@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"groups": 2}, {"dilation": (1, 2), "groups": 2}])
def test_the_convention_is_that_of_torch(size, k, options) -> None:
    conv = nn.Conv2d(4, 6, k, padding="same", padding_mode="circular", bias=False, dtype=torch.float64, **options)
    x = random(2, 4, *size)
    D = fourier.spectrum(conv.weight, size, **options)
    torch.testing.assert_close(fourier.spectral_conv2d(x, D), conv(x))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", KERNELS)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_adjoint_and_kernel(size, k, dilation, groups) -> None:
    weight, x = random(4, 6 // groups, *k), random(2, 6, *size)
    C = grouped(weight, groups, lambda W: conv_matrix(W, size, dilation))
    D = fourier.spectrum(weight, size, dilation=dilation, groups=groups)
    y = fourier.spectral_conv2d(x, D)
    torch.testing.assert_close(y.flatten(1), x.flatten(1) @ C.mT)
    torch.testing.assert_close(fourier.spectral_conv2d(y, D.mH).flatten(1), y.flatten(1) @ C)
    whole = fourier.kernel_of(D, size)
    torch.testing.assert_close(grouped(whole, groups, lambda W: conv_matrix(W, size)), C)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", KERNELS)
@pytest.mark.parametrize("groups", [1, 3])
def test_singular_values_determinant_and_inverse(size, k, groups) -> None:
    weight = random(3, 3 // groups, *k)
    C = grouped(weight, groups, lambda W: conv_matrix(W, size))
    values = fourier.singular_values(weight, size, groups=groups)
    assert values.shape == (*size, 3)
    torch.testing.assert_close(values.flatten().sort().values, torch.linalg.svdvals(C).sort().values)
    torch.testing.assert_close(fourier.logabsdet(weight, size, groups=groups), torch.linalg.slogdet(C).logabsdet)
    y = random(2, 3, *size)
    x = fourier.inverse_conv2d(y, weight, groups=groups)
    torch.testing.assert_close(x.flatten(1) @ C.mT, y.flatten(1), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("shape", [(2, 5), (5, 2)])
def test_singular_values_of_rectangular_convolutions(shape) -> None:
    weight = random(*shape, 3, 3)
    values = fourier.singular_values(weight, (4, 5))
    expected = torch.linalg.svdvals(conv_matrix(weight, (4, 5)))
    torch.testing.assert_close(values.flatten().sort().values, expected.sort().values)


def test_singular_values_stand_at_their_frequency() -> None:
    """A filter along the width has values that change along the width: 1 + cos does not care for the height."""
    weight = torch.tensor([[[[0.25, 0.5, 0.25]]]], dtype=torch.float64)
    v = torch.arange(6, dtype=torch.float64)
    expected = (0.5 + 0.5 * torch.cos(2 * torch.pi * v / 6)).expand(4, 6)
    torch.testing.assert_close(fourier.singular_values(weight, (4, 6))[..., 0], expected)


@pytest.mark.parametrize(
    "function", [fourier.logabsdet, lambda w, size: fourier.inverse_conv2d(random(1, 3, *size), w)]
)
def test_unequal_channels_are_refused(function) -> None:
    with pytest.raises(ValueError, match="as many input as output channels, got 2 -> 3"):
        function(random(3, 2, 3, 3), (4, 4))


def test_spectra_in_float32_lose_no_more_than_rounding() -> None:
    weight = torch.randn(8, 8, 5, 5)
    exact = fourier.spectrum(weight.double(), (64, 48))
    assert (fourier.spectrum(weight, (64, 48)) - exact).abs().max() < 1e-5


def test_gradients_of_the_apply_step() -> None:
    x, D = random(2, 1, 3, 4).requires_grad_(), torch.randn(1, 9, 2, 1, dtype=torch.complex128, requires_grad=True)
    torch.autograd.gradcheck(fourier.spectral_conv2d, (x, D))
    torch.autograd.gradgradcheck(fourier.spectral_conv2d, (x, D))
