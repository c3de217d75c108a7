"""channels_last in, channels_last out, with the values and gradients of contiguous images; every registered method."""

import copy

import pytest
import torch
from torch import Tensor, nn

from orthoconv import models
from orthoconv.nn import CayleyConvTranspose2d, conv_methods
from orthoconv.nn.methods import conv_method

LAST = torch.channels_last
CASES = [
    (4, 4, 3, (4, 6), {}),
    (2, 8, 3, (9, 8), {}),  # lifted, where that pays
    (8, 2, 3, (9, 8), {"groups": 2}),
    (3, 8, 4, (6, 4), {"stride": 2}),
    (2, 8, 2, (4, 6), {"stride": 2}),  # one tap
    (4, 4, 3, (5, 4), {"padding_mode": "zeros", "bias": False}),
]


def values_and_gradients(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    return (y, *torch.autograd.grad(y.sin().sum(), (x, *layer.parameters())))


QUICK = {(1, True), (3, False)}  # cases and modes that methods other than Cayley have in the quick suite


@pytest.mark.parametrize(
    ("name", "case", "training"),
    [
        pytest.param(
            name, case, training, id=f"{name}-{k}-{'train' if training else 'eval'}",
            marks=[] if name == "cayley" or (k, training) in QUICK else [pytest.mark.slow],
        )
        for name in conv_methods()
        for k, case in enumerate(CASES)
        for training in (True, False)
    ],
)  # fmt: skip
def test_values_and_gradients_are_those_of_contiguous_images(name: str, case: tuple, training: bool) -> None:
    i, o, k, size, options = case
    layer = conv_method(name)(i, o, k, **options, dtype=torch.float64).train(training)
    x = torch.randn(3, i, *size, dtype=torch.float64)
    expected = values_and_gradients(layer, x)
    other = copy.deepcopy(layer).to(memory_format=LAST)
    for model in (layer, other):
        found = values_and_gradients(model, x.contiguous(memory_format=LAST))
        torch.testing.assert_close(found, expected)
        assert found[0].is_contiguous(memory_format=LAST)
        plain = values_and_gradients(model, x)
        torch.testing.assert_close(plain, expected)
        assert plain[0].is_contiguous()


def test_the_check_would_see_another_layout_and_another_value() -> None:
    """The negative control: a layer that returns contiguous images, and one that reads the strides of its input."""
    x = torch.randn(2, 4, 3, 5).contiguous(memory_format=LAST)
    assert not nn.Conv2d(4, 4, 1)(x).contiguous().is_contiguous(memory_format=LAST)
    raw = torch.as_strided(x, x.shape, x.contiguous().stride())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(raw, x)


def test_a_transposed_layer_and_an_image_without_batch() -> None:
    layer = CayleyConvTranspose2d(8, 3, 4, stride=2, dtype=torch.float64)
    x = torch.randn(2, 8, 4, 5, dtype=torch.float64)
    y = layer(x.contiguous(memory_format=LAST))
    assert y.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(layer(x.contiguous(memory_format=LAST)[0]), layer(x)[0])


@pytest.mark.parametrize("name", ["kwlarge", "resnet9", "liresnet"])
def test_a_whole_network_trains_in_channels_last(name: str) -> None:
    model = models.build(name, width=0.125, image_size=16).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = values_and_gradients(model, x)
    model.to(memory_format=LAST)
    torch.testing.assert_close(values_and_gradients(model, x.contiguous(memory_format=LAST)), expected)
