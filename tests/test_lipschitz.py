import math

import pytest
import torch
from torch import Tensor, nn

from orthoconv import empirical_lipschitz, in_double, lipschitz_bound, register_rule
from orthoconv.certificates import growth
from orthoconv.nn import (
    CayleyConv2d,
    CayleyLinear,
    CircularConv2d,
    ConvexResidual,
    MaxMin,
    Normalize,
    OSSNConv2d,
    Scale,
    ScaledAvgPool2d,
)
from orthoconv.testing import dense_matrix

SHAPE = (2, 6, 4)


def norm_of(layer: nn.Module, shape: tuple[int, ...] = SHAPE) -> float:
    matrix = dense_matrix(layer, shape, dtype=torch.float64)
    return torch.linalg.matrix_norm(matrix, ord=2).item()


LINEAR = {  # the bound is the norm
    "cayley": CayleyConv2d(2, 4, 3),
    "cayley strided": CayleyConv2d(2, 4, 4, stride=2, groups=2),
    "ossn": OSSNConv2d(2, 4, 3),
    "circular": CircularConv2d(2, 6, 3, dilation=2, groups=2),
    "torch circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "torch circular even": nn.Conv2d(2, 3, (2, 4), padding="same", padding_mode="circular", groups=1),
    "1x1": nn.Conv2d(2, 3, 1),
    "pool": ScaledAvgPool2d(2),
    "average pool": nn.AvgPool2d(2),
    "adaptive average pool": nn.AdaptiveAvgPool2d((2, None)),
    "adaptive average pool of all": nn.AdaptiveAvgPool2d(1),
    "average pool of another divisor": nn.AvgPool2d(2, divisor_override=2),
    "normalize": Normalize([0.5, 0.5], [0.5, 0.25]),
    "scale": Scale(-3.0),
    "identity": nn.Identity(),
}
UPPER = {  # the bound is at least the norm, and not far from it
    "zeros": nn.Conv2d(2, 3, 3, padding=1),
    "no padding": nn.Conv2d(2, 3, 3),
    "stride": nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "stride, circular": nn.Conv2d(2, 3, 3, stride=2, padding=1, padding_mode="circular"),
    "dilation, groups": nn.Conv2d(2, 4, 2, padding=1, dilation=2, groups=2),
    "overlapping pool": nn.AvgPool2d(3, stride=1),
    "overlapping pool with padding": nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
    "ceil": nn.AvgPool2d(4, ceil_mode=True),
    "transposed": nn.ConvTranspose2d(2, 3, 3),
    "transposed, stride": nn.ConvTranspose2d(2, 4, (3, 2), stride=2, padding=1, output_padding=1, groups=2),
    "transposed, dilation": nn.ConvTranspose2d(2, 3, 2, dilation=(1, 2), bias=False),
    "zero padding": nn.ZeroPad2d((1, 0, 2, 1)),
    "padding by a number": nn.ConstantPad2d((1, -1, 2, 1), 3.0),
}


@pytest.mark.parametrize("name", LINEAR)
def test_bound_of_linear_layers_is_their_norm(name: str) -> None:
    layer = LINEAR[name].double()
    assert lipschitz_bound(layer, SHAPE) == pytest.approx(norm_of(layer), rel=1e-9)
    assert lipschitz_bound(layer, SHAPE) >= norm_of(layer) * (1 - 1e-13)


@pytest.mark.parametrize("name", UPPER)
def test_bound_is_above_the_norm(name: str) -> None:
    layer = UPPER[name].double()
    assert norm_of(layer) <= lipschitz_bound(layer, SHAPE) <= 4 * norm_of(layer)


def test_bound_sees_the_operator_as_it_is_in_float32() -> None:
    """Not an assumed 1: a layer whose matrices are spoiled by 1e-4 has a bound of 1.0001."""
    layer = CayleyConv2d(8, 8, 3)
    bound = lipschitz_bound(layer, (8, 6, 6))
    assert 1 - 1e-6 < bound < 1 + 1e-5
    with torch.no_grad():  # with gradients, LAPACK inverts the matrices, which round otherwise
        assert bound == pytest.approx(layer.singular_values((6, 6)).max().item(), rel=1e-12)

    class Spoiled(CayleyConv2d):
        def operator(self, size, *sources: Tensor) -> Tensor:
            return super().operator(size, *sources) * (1 + 1e-4)

    assert lipschitz_bound(Spoiled(8, 8, 3), (8, 6, 6)) > 1.00009


@pytest.mark.parametrize("part", ["operator", "sources", "transform"])
@pytest.mark.parametrize(("i", "o", "n"), [(4, 4, 6), (2, 19, 10), (4, 4, 10)])
def test_what_a_subclass_computes_is_what_runs(part: str, i: int, o: int, n: int) -> None:
    """No faster way goes around an operator that a subclass has changed."""

    class Changed(CayleyConv2d):
        pass

    def change(self, *args):
        value = getattr(CayleyConv2d, part)(self, *args)
        return (2 * value[0], 3 * value[1], *value[2:]) if part == "sources" else 0.5 * value

    setattr(Changed, part, change)
    layer = Changed(i, o, 3, bias=False).double()
    for mode in (True, False):
        norm = norm_of(layer.train(mode), (i, n, n))
        assert norm <= lipschitz_bound(layer, (i, n, n)) <= norm * (1 + 1e-6)


def test_groups_count_with_their_maximum() -> None:
    layer = CircularConv2d(2, 2, 1, groups=2, bias=False).double()
    layer.weight.data.copy_(torch.tensor([2.0, 3.0]).view(2, 1, 1, 1))
    assert lipschitz_bound(layer, SHAPE) == pytest.approx(3.0)


def test_composition_and_residuals() -> None:
    inner = nn.Sequential(Scale(2.0), MaxMin(), Scale(3.0))
    model = nn.Sequential(Scale(0.5), ConvexResidual(inner), nn.Flatten(), nn.ReLU())
    assert lipschitz_bound(model, SHAPE) == pytest.approx(0.5 * (0.5 * 6 + 0.5))
    model[1].alpha.data.fill_(math.log(3.0))
    assert lipschitz_bound(model, SHAPE) == pytest.approx(0.5 * (0.75 * 6 + 0.25))


def test_sizes_are_followed_through_the_model() -> None:
    """The norm of a plain convolution depends on the image size, which the pooling before it changes."""
    conv = CircularConv2d(1, 1, 3, bias=False).double()
    conv.weight.data.copy_(torch.tensor([[-1.0, 2.0, -1.0]]).repeat(3, 1).view(1, 1, 3, 3))
    odd = lipschitz_bound(nn.Sequential(ScaledAvgPool2d(2), conv), (1, 6, 6))
    even = lipschitz_bound(conv, (1, 6, 6))
    assert even == pytest.approx(12.0)
    assert odd == pytest.approx(9.0)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 5 * x if x.sum() > 0 else x


class Disguised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 5 * super().forward(x)


@pytest.mark.parametrize("layer", [Unknown(), Disguised(6, 6), nn.GELU(), nn.ModuleList()])
def test_what_cannot_be_bounded_is_named(layer: nn.Module) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity(), layer))
    with pytest.raises(TypeError, match=rf"no rule for .*{type(layer).__name__}, at Sequential\.1\.1;.*register_rule"):
        lipschitz_bound(model, (6,))


def test_a_forward_replaced_on_the_instance_is_not_trusted() -> None:
    layer = nn.Identity()
    layer.forward = lambda x: 5 * x
    with pytest.raises(TypeError, match="no rule for"):
        lipschitz_bound(layer, (6,))


def test_hooks_are_not_trusted() -> None:
    layer = nn.Identity()
    layer.register_forward_hook(lambda module, inputs, output: 5 * output)
    with pytest.raises(TypeError, match=r"forward hooks of Sequential\.0"):
        lipschitz_bound(nn.Sequential(layer), (6,))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm2d(2), "eval mode only"),
        (nn.Dropout(), "eval mode only"),
        (nn.FeatureAlphaDropout(), "eval mode only"),
        (nn.ConstantPad2d(1, float("-inf")), "adds a finite number, got -inf; pad by the pool"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "by zeros or circular"),
        (nn.Conv2d(2, 2, 3, padding=2, padding_mode="circular"), "keeps the size"),
    ],
)
def test_layers_that_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        lipschitz_bound(layer, SHAPE)


def test_dropout_in_eval_mode() -> None:
    assert lipschitz_bound(nn.Dropout1d().eval(), (2, 4)) == 1
    with pytest.raises(TypeError, match="eval mode only"):
        lipschitz_bound(nn.Dropout1d(), (2, 4))


def test_batch_norm_in_eval_mode() -> None:
    layer = nn.BatchNorm2d(2).eval()
    layer.running_var.copy_(torch.tensor([4.0, 0.25]))
    layer.weight.data.copy_(torch.tensor([1.0, -3.0]))
    assert lipschitz_bound(layer, SHAPE) == pytest.approx(6.0, rel=1e-4)


NONLINEAR = nn.ELU(), nn.ELU(2.5), nn.Softshrink(0.3), nn.PReLU(2, init=-1.7), nn.Hardsigmoid()


@pytest.mark.parametrize("layer", NONLINEAR, ids=str)
def test_rounding_of_nonlinear_layers(layer: nn.Module) -> None:
    x = torch.randn(200, *SHAPE) * torch.logspace(-6, 2, 200).view(-1, 1, 1, 1)
    with torch.no_grad():
        exact = in_double(layer)(x.double())
        error = (layer(x).double() - exact).flatten(1).norm(dim=1)
    assert (error <= growth(layer, SHAPE).error(x.double().flatten(1).norm(dim=1))).all()
    assert error.max() > 0


def test_nonlinear_layers_are_within_their_bound() -> None:
    for layer in (
        nn.LeakyReLU(2.0),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 1),
        MaxMin(),
        *NONLINEAR,
    ):
        x, y = 3 * torch.randn(500, *SHAPE), 3 * torch.randn(500, *SHAPE)
        y[250:] = x[250:] + 0.01 * y[250:]
        ratios = (layer(x) - layer(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
        assert ratios.max() <= lipschitz_bound(layer, SHAPE) + 1e-5


def test_registering_a_rule() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Scale(2.0)

        def forward(self, x: Tensor) -> Tensor:
            return -self.inside(x)

    register_rule(Mine, lipschitz=lambda module, shape: lipschitz_bound(module.inside, shape))
    assert lipschitz_bound(nn.Sequential(Mine(), Mine()), SHAPE) == 4


def test_non_finite_weights_are_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.data.fill_(float("nan"))
    with pytest.raises((ValueError, RuntimeError), match=r"finite|converge|non-finite"):
        lipschitz_bound(layer, (2,))


def model_and_images() -> tuple[nn.Sequential, Tensor]:
    layers = CayleyConv2d(3, 8, 3), MaxMin(), CayleyConv2d(8, 8, 3), nn.Flatten(), CayleyLinear(512, 5)
    return nn.Sequential(*layers), torch.rand(6, 3, 8, 8)


def test_empirical_constants_are_below_the_bound() -> None:
    model, x = model_and_images()
    found = empirical_lipschitz(model, x, eps=0.5)
    assert found.shape == (6,)
    assert (found <= lipschitz_bound(model, (3, 8, 8)) + 1e-5).all()
    assert (found > 0.2).all()


def test_empirical_constant_finds_the_norm_of_a_linear_map() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 12)).double()
    x = torch.rand(3, 3, 2, 2, dtype=torch.float64)
    norm = torch.linalg.matrix_norm(model[1].weight, ord=2).item()
    found = empirical_lipschitz(model, x, eps=0.1, steps=200, bounds=None)
    assert (found <= norm + 1e-9).all()
    assert (found > 0.95 * norm).all()
    assert (found >= empirical_lipschitz(model, x, eps=0.1, steps=0, bounds=None) - 0.2).all()


def test_empirical_constant_is_repeatable_and_leaves_the_model_alone() -> None:
    model, x = model_and_images()
    runs = [empirical_lipschitz(model, x, 0.3, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*runs)
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    with pytest.raises(ValueError, match=r"eps must be more than .* got -1"):
        empirical_lipschitz(model, x, -1)


def test_a_layer_that_stands_in_two_places_counts_twice() -> None:
    layer = Scale(3.0)
    assert lipschitz_bound(nn.Sequential(layer, MaxMin(), layer), (4,)) == 9
    pool = ScaledAvgPool2d(2)
    model = nn.Sequential(pool, pool, nn.Flatten(), nn.Linear(2, 2))
    assert lipschitz_bound(model, (2, 4, 4)) == pytest.approx(lipschitz_bound(model[3], (2,)))


def test_a_subclass_with_methods_of_its_own_is_not_trusted() -> None:
    class Tenfold(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, 10 * weight, bias)

    class Loud(CayleyConv2d):
        def convolve(self, x, operator, *, adjoint):
            return 10 * super().convolve(x, operator, adjoint=adjoint)

    class Harmless(CayleyConv2d):
        def __init__(self) -> None:
            super().__init__(2, 4, 3)

        def reset_parameters(self) -> None:
            super().reset_parameters()

    for layer in (Tenfold(2, 4, 3), Loud(2, 4, 3)):
        with pytest.raises(TypeError, match="no rule for"):
            lipschitz_bound(layer, SHAPE)
    assert lipschitz_bound(Harmless(), SHAPE) == pytest.approx(1.0, rel=1e-5)


def test_a_parametrized_layer_is_bounded_as_it_is() -> None:
    layer = torch.nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))
    assert lipschitz_bound(layer, (5,)) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("layer", [CircularConv2d(8, 8, 3), OSSNConv2d(8, 8, 3), nn.Conv2d(8, 8, 3)])
def test_kernels_are_taken_to_float64_before_their_spectrum(layer: nn.Module) -> None:
    """The bound of a float32 layer is that of the same numbers in float64, to the last digits."""
    for seed in range(5):
        torch.manual_seed(seed)
        layer.reset_parameters()
        exact = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
        if isinstance(layer, nn.Conv2d):
            twin = nn.Conv2d(8, 8, 3, dtype=torch.float64)
            twin.load_state_dict(layer.state_dict())
            expected = lipschitz_bound(twin, (8, 6, 6))
        else:
            exact.weight.data = layer.cached_operator((6, 6)).detach().double()
            expected = lipschitz_bound(exact, (8, 6, 6))
        assert lipschitz_bound(layer, (8, 6, 6)) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Softplus(1, threshold=20.0), "threshold from 40 to 80"),
        (CayleyConv2d(2, 4, 3).half(), "its parameters are torch.float16"),
        (CayleyLinear(4, 4).bfloat16(), "its parameters are torch.bfloat16"),
    ],
)
def test_more_layers_that_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        lipschitz_bound(layer, SHAPE)


def test_pooling_with_odd_options() -> None:
    assert lipschitz_bound(nn.AvgPool2d(2, divisor_override=-1), SHAPE) == pytest.approx(2.0)
    assert lipschitz_bound(nn.AvgPool2d([2, 2]), SHAPE) == pytest.approx(0.5)
    assert lipschitz_bound(nn.MaxPool2d([2, 2]), SHAPE) == pytest.approx(1.0)
    overlapping = nn.AdaptiveAvgPool2d(5)
    norm = torch.linalg.matrix_norm(dense_matrix(overlapping, SHAPE), ord=2).item()
    assert lipschitz_bound(overlapping, SHAPE) == pytest.approx(norm, rel=1e-6)


def test_input_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"input_shape must be .* got 3"):
        lipschitz_bound(nn.Identity(), 3)
    with pytest.raises(ValueError, match="takes images of shape"):
        lipschitz_bound(CayleyConv2d(3, 8, 3), (5, 8, 8))


def test_residuals_whose_branches_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="branches of one shape"):
        lipschitz_bound(ConvexResidual(CayleyConv2d(1, 8, 3)), (1, 6, 6))
    with pytest.raises(ValueError, match="is in place"):
        ConvexResidual(nn.Sequential(nn.LeakyReLU(3.0, inplace=True)))


def test_empirical_constants_need_an_eps_above_rounding() -> None:
    with pytest.raises(ValueError, match="eps must be more than"):
        empirical_lipschitz(Scale(0.5), torch.rand(4, 3, 8, 8), 1e-6)
    x = torch.rand(4, 3, 8, 8, dtype=torch.float64)
    assert empirical_lipschitz(Scale(0.5), x, 1e-6).max() <= 0.5 * (1 + 1e-9)


def test_empirical_constants_without_gradients_around() -> None:
    model, x = model_and_images()
    expected = empirical_lipschitz(model, x, 0.3, generator=torch.Generator().manual_seed(1))
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = empirical_lipschitz(model, x, 0.3, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("constant", [1e4, 1e6])
def test_rounding_does_not_count_as_growth(constant: float) -> None:
    """A bias so large that the outputs are rounded by more than the inputs move."""
    for layer, shape in ((CayleyConv2d(3, 8, 3), (3, 8, 8)), (CayleyLinear(16, 8), (16,))):
        nn.init.constant_(layer.bias, constant)
        for mode in (True, False):
            x = torch.rand(8, *shape, generator=torch.Generator().manual_seed(0))
            found = empirical_lipschitz(layer.train(mode), x, 0.05, generator=torch.Generator().manual_seed(1))
            assert found.max() <= 1 + 1e-5
