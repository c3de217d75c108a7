"""Bad arguments and inputs are refused with the value that was given and what is accepted."""

import pytest
import torch

from orthoconv import fourier
from orthoconv.nn import (
    AOCConv2d,
    AOCConvTranspose2d,
    AOLLinear,
    BCOPConv2d,
    BCOPConvTranspose2d,
    BROConv1d,
    BROConv3d,
    BROLinear,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
    CholeskyLinear,
    CPLConv2d,
    CPLLinear,
    LOTConv2d,
    LOTConvTranspose2d,
    OSSNConv2d,
    PolarLinear,
    ShiftConv2d,
    SLLConv2d,
    SLLLinear,
    SOCConv2d,
)

CONSTRUCTOR = [
    ({"padding": 0}, r'padding must be "same", or 1, with .*got 0'),
    ({"padding": "valid"}, r"padding must be .*got 'valid'"),
    ({"padding": (1, 2)}, r"got \(1, 2\)"),
    ({"padding": 1, "kernel_size": 2}, r'padding must be "same" with kernel_size=\(2, 2\)'),
    ({"padding_mode": "reflect"}, r"padding_mode must be \"circular\" or \"zeros\", got 'reflect'"),
    ({"groups": 3}, r"groups must divide the channels 4 -> 6, got 3"),
    ({"groups": 0}, r"groups must be a positive int, got 0"),
    ({"stride": 0}, r"stride must be a positive int or a pair of them, got 0"),
    ({"stride": (1, 2, 3)}, r"stride must be .* got \(1, 2, 3\)"),
    ({"kernel_size": 2.5}, r"kernel_size must be .* got 2.5"),
    ({"kernel_size": "3"}, r"kernel_size must be .* got '3'"),
    ({"dilation": -1}, r"dilation must be .* got -1"),
    ({"in_channels": 0}, r"in_channels must be a positive int, got 0"),
    ({"out_channels": 2.0}, r"out_channels must be a positive int, got 2.0"),
    ({"signs": "some"}, r"signs must be None, \"random\" or 4 numbers .* got 'some'"),
    ({"signs": [1, 1, -1, 0]}, r"signs must be .* got \[1, 1, -1, 0\]"),
    ({"signs": [1, -1]}, r"signs must be .* got \[1, -1\]"),
]


@pytest.mark.parametrize(("arguments", "message"), CONSTRUCTOR, ids=lambda v: str(v)[:40])
def test_constructor(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        CayleyConv2d(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **arguments})


@pytest.mark.parametrize(
    ("k", "s", "d", "padding"),
    [
        (3, 1, 1, 1),
        (5, 1, 1, (2, 2)),
        (1, 1, 1, 0),
        (3, 1, 2, 2),
        (3, 2, 1, 1),
        (4, 2, 1, 1),
        (2, 2, 1, 0),
        (7, 2, 1, 3),
    ],
)
def test_the_equal_padding_is_accepted(k, s, d, padding) -> None:
    layer = CayleyConv2d(2, 8, k, s, padding, d)
    plain = torch.nn.Conv2d(2, 8, k, s, padding, d)
    x = torch.randn(1, 2, 8, 8)
    assert layer(x).shape == plain(x).shape


@pytest.mark.parametrize(
    ("arguments", "output_padding"),
    [({"stride": 2, "padding": 1}, 1), ({"stride": 2, "padding": 1, "kernel_size": 4}, 0), ({"padding": 1}, 0)],
)
def test_output_padding_of_the_transpose(arguments, output_padding) -> None:
    arguments = {"in_channels": 8, "out_channels": 2, "kernel_size": 3, **arguments}
    x = torch.randn(1, 8, 4, 4)
    layer = CayleyConvTranspose2d(**arguments, output_padding=output_padding)
    plain = torch.nn.ConvTranspose2d(**arguments, output_padding=output_padding)
    assert layer(x).shape == plain(x).shape
    with pytest.raises(ValueError, match=r"output_padding must be .* got 3"):
        CayleyConvTranspose2d(**arguments, output_padding=3)


def test_positional_order_is_that_of_torch() -> None:
    layer = CayleyConv2d(4, 8, 3, 1, "same", 2, 2, False, "circular")
    assert (layer.dilation, layer.groups, layer.bias) == ((2, 2), 2, None)
    layer = CayleyConvTranspose2d(4, 8, 3, 1, 1, 0, 2, False, 1)
    assert (layer.groups, layer.bias, layer.dilation) == (2, None, (1, 1))


INPUTS = [
    (torch.randn(2, 4, 8, 8), ValueError, r"takes images of shape \(b, 3, h, w\) or \(3, h, w\), got \(2, 4, 8, 8\)"),
    (torch.randn(8, 8), ValueError, r"got \(8, 8\)"),
    (torch.randn(1, 1, 3, 8, 8), ValueError, r"got \(1, 1, 3, 8, 8\)"),
    (torch.randn(1, 3, 8, 7), ValueError, r"multiples of its stride \(2, 2\), got \(8, 7\)"),
    (torch.randn(1, 3, 0, 8), ValueError, r"got \(0, 8\)"),
    (torch.zeros(1, 3, 8, 8, dtype=torch.int64), TypeError, r"of torch.float32 takes .* got torch.int64"),
    (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), TypeError, r"got torch.uint8"),
    (torch.zeros(1, 3, 8, 8, dtype=torch.complex64), TypeError, r"got torch.complex64"),
    (torch.zeros(1, 3, 8, 8, dtype=torch.float64), TypeError, r"got torch.float64"),
    (torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16), TypeError, r"got torch.bfloat16"),
]


@pytest.mark.parametrize(("x", "error", "message"), INPUTS, ids=[m[:30] for _, _, m in INPUTS])
def test_input(x, error, message) -> None:
    with pytest.raises(error, match=message):
        CayleyConv2d(3, 8, 3, stride=2)(x)


@pytest.mark.parametrize("name", ["weight", "g"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", [True, False])
def test_non_finite_weights(name, value, mode) -> None:
    for layer, x in ((CayleyConv2d(3, 4, 3), torch.randn(1, 3, 4, 4)), (CayleyLinear(3, 4), torch.randn(1, 3))):
        layer.train(mode)
        layer(x)
        getattr(layer, name).data.view(-1)[0] = value
        with pytest.raises(ValueError, match=rf"needs finite weights: {name} has norm {value}, with 1 non-finite"):
            layer(x)


def test_linear() -> None:
    with pytest.raises(ValueError, match=r"shape \(\.\.\., 3\), got \(2, 4\)"):
        CayleyLinear(3, 2)(torch.randn(2, 4))
    with pytest.raises(TypeError, match=r"got torch.int64"):
        CayleyLinear(3, 2)(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="in_features must be a positive int, got -1"):
        CayleyLinear(-1, 2)


def test_half_precision_parameters() -> None:
    layer = CayleyConv2d(3, 3, 3).bfloat16()
    with pytest.raises(
        TypeError, match=r"computes in torch.float32 or torch.float64, its parameters are torch.bfloat16"
    ):
        layer(torch.randn(1, 3, 4, 4, dtype=torch.bfloat16))


KINDS = [
    LOTConv2d, LOTConvTranspose2d, AOCConv2d, AOCConvTranspose2d, SOCConv2d, SLLConv2d, BROConv1d, BROConv3d,
    PolarLinear, CholeskyLinear, BROLinear, CPLLinear, SLLLinear,
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: type, **options):
    return kind(4, 4, **options) if kind.__name__.endswith("Linear") else kind(4, 4, 3, **options)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64, "float32"])
def test_precisions_in_which_no_layer_computes(kind, dtype) -> None:
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__} takes dtype=torch.float32 or torch.float64, got {dtype!r}$"
    ):
        build(kind, dtype=dtype)


def test_a_default_of_torch_in_which_no_layer_computes() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(TypeError, match=r"got torch\.bfloat16, the default of torch$"):
            PolarLinear(4, 4)
        assert PolarLinear(4, 4, dtype=torch.float32).weight.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@every_kind
def test_options_of_other_names(kind) -> None:
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__} has no option 'foo'; it takes in_\w+, .*, dtype\b.*identity"
    ):
        build(kind, foo=1)


@every_kind
@pytest.mark.parametrize("option", ["bias", "identity"])
@pytest.mark.parametrize("value", ["no", None, 0, 1.0])
def test_truth_values(kind, option, value) -> None:
    with pytest.raises(ValueError, match=rf"\b{option} must be True or False, got {value!r}$"):
        build(kind, **{option: value})


@every_kind
@pytest.mark.parametrize(("x", "given"), [(None, "None"), ([1.0], "a list"), (torch.ones(4).numpy(), "a ndarray")])
def test_inputs_that_are_no_tensors(kind, x, given) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__} takes a tensor, got {given}$"):
        build(kind)(x)


@pytest.mark.parametrize("kind", [CPLConv2d, SLLConv2d, LOTConv2d])
def test_shapes_without_a_height_and_a_width(kind) -> None:
    for ask in (kind(4, 4, 3).lipschitz, kind(4, 4, 3).rounding_units):
        with pytest.raises(ValueError, match=r"images have a height and a width, got inputs of shape \(4,\)"):
            ask((4,))


@pytest.mark.parametrize("size", [(3,), (1, 4, 5, 6)])
def test_inverse_of_a_layer_with_a_position(size) -> None:
    layer, x = ShiftConv2d(4, 4, 3, position=(6, 6)), torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"inverse of a ShiftConv2d with position=\(6, 6\) takes images of \(6, 6\), got"
    ):
        layer.inverse(torch.zeros(size))


def test_inverse_that_does_not_exist() -> None:
    with pytest.raises(
        ValueError, match=r"CayleyConv2d 3 -> 6 with stride \(2, 2\) has no inverse: it maps 12 channels"
    ):
        CayleyConv2d(3, 6, 3, stride=2).inverse(torch.randn(1, 6, 4, 4))


def test_inverse_says_that_the_padding_is_the_reason() -> None:
    reason = r"it is not orthogonal, since padding_mode='zeros' crops"
    with pytest.raises(ValueError, match=rf"^LOTConv2d 4 -> 4 with stride \(1, 1\) has no inverse: {reason}"):
        LOTConv2d(4, 4, 3, padding_mode="zeros").inverse(torch.randn(1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"has no inverse: it is not orthogonal$"):
        OSSNConv2d(4, 4, 3, padding_mode="zeros").inverse(torch.randn(1, 4, 4, 4))


@pytest.mark.parametrize(("kind", "reason"), [(PolarLinear, "maps 4 features to 3"), (AOLLinear, "is not orthogonal")])
def test_inverse_of_a_linear_layer_that_does_not_exist(kind, reason) -> None:
    with pytest.raises(ValueError, match=rf"^{kind.__name__} 4 -> 3 has no inverse: it {reason}$"):
        kind(4, 3).inverse(torch.randn(2, 3))


@pytest.mark.parametrize("c", [4, 512])
def test_inverse_of_a_linear_layer_with_weights_of_lower_rank(c) -> None:
    layer = PolarLinear(c, c)
    with torch.no_grad():
        layer.weight[:, 1] = layer.weight[:, 0]
    with pytest.raises(
        ValueError, match=rf"PolarLinear has no inverse with these weights: .* its {c} .* up to {c - 1}\b"
    ):
        layer.inverse(torch.randn(2, c))


def test_inverse_of_a_linear_layer_checks_its_input() -> None:
    with pytest.raises(ValueError, match=r"PolarLinear takes inputs of shape \(\.\.\., 6\), got \(2, 4\)"):
        PolarLinear(4, 6).inverse(torch.randn(2, 4))
    with pytest.raises(TypeError, match=r"takes inputs of that dtype, got torch.float64"):
        PolarLinear(4, 6).inverse(torch.randn(2, 6, dtype=torch.float64))


@pytest.mark.parametrize("kind", [BCOPConv2d, BCOPConvTranspose2d, AOCConv2d])
def test_inverse_with_weights_of_lower_rank(kind) -> None:
    layer, x = kind(6, 6, 3), torch.randn(2, 6, 8, 8)
    torch.testing.assert_close(layer.inverse(layer(x)), x, rtol=0, atol=1e-4)
    with torch.no_grad():
        layer.weight[:, 3:] = 0
    with pytest.raises(ValueError, match=rf"{kind.__name__} has no inverse with these weights: .* by 0\.\d+"):
        layer.inverse(layer(x))


def test_numpy_ints_are_ints_and_truth_values_are_not() -> None:
    numpy = pytest.importorskip("numpy")
    layer = CayleyConv2d(numpy.int64(3), numpy.int32(8), numpy.int64(3), numpy.int8(2), numpy.int64(1))
    assert layer(torch.zeros(1, 3, 4, 4)).shape == (1, 8, 2, 2)
    assert CayleyConvTranspose2d(4, 2, 3, output_padding=numpy.int64(0)).output_padding == (0, 0)
    assert CayleyLinear(numpy.int64(3), 2).in_features == 3
    with pytest.raises(ValueError, match="in_channels must be a positive int, got True"):
        CayleyConv2d(True, 8, 3)
    with pytest.raises(ValueError, match=r"kernel_size must be .* got True"):
        CayleyConv2d(3, 8, True)


@pytest.mark.parametrize("padding", [1.0, None, torch.tensor(1), [1], {1: 1}, "zeros", True])
def test_paddings_of_other_types(padding) -> None:
    with pytest.raises(ValueError, match='padding must be "same"'):
        CayleyConv2d(3, 8, 3, padding=padding)


@pytest.mark.parametrize("signs", [["a", "b", "c"], 5, [[1, 1, 1]]])
def test_signs_of_other_types(signs) -> None:
    with pytest.raises(ValueError, match="signs must be None"):
        CayleyConv2d(3, 8, 3, signs=signs)


def test_signs_on_the_meta_device() -> None:
    assert CayleyConv2d(3, 8, 3, signs=[1, -1, 1], device="meta").signs.is_meta


@pytest.mark.parametrize("y", [torch.randn(1, 1, 8, 8), torch.ones(1, 8, 8, 8, dtype=torch.int64)])
def test_inverse_checks_its_input(y) -> None:
    with pytest.raises((ValueError, TypeError), match=r"takes images of shape \(b, 8|takes inputs of that dtype"):
        CayleyConv2d(3, 8, 3).inverse(y)


def test_sizes_are_pairs() -> None:
    assert CayleyConv2d(3, 8, 3).singular_values(8).shape == (8, 8, 3)
    with pytest.raises(ValueError, match="size must be a positive int or a pair"):
        CayleyConv2d(3, 8, 3).singular_values((8, 8, 8))
    with pytest.raises(ValueError, match="an image size"):
        fourier.singular_values(torch.randn(4, 3, 3, 3), 8)
    with pytest.raises(ValueError, match="groups=3"):
        fourier.singular_values(torch.randn(4, 3, 3, 3), (8, 8), groups=3)


def test_the_kernel_of_a_layer_that_depends_on_the_image() -> None:
    with pytest.raises(ValueError, match="depends on the image"):
        _ = OSSNConv2d(3, 4, 3).kernel
