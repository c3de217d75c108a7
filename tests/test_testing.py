"""The checkers themselves: right on right layers, and each fed wrong ones, which it must refuse."""

import pytest
import torch
from torch import nn

from orthoconv.nn import CayleyConv2d, CayleyLinear, CPLConv2d, MaxMin, RKOConv2d
from orthoconv.testing import (
    assert_nonexpansive,
    assert_orthogonal,
    check_layer,
    dense_matrix,
    norm_ratios,
    orthogonality_error,
)

SHAPE = (3, 5, 4)


def cayley() -> CayleyConv2d:
    return CayleyConv2d(3, 3, 3, dtype=torch.float64)


WRONG = {
    "scaled up": lambda: nn.Sequential(cayley(), Times(1 + 1e-6)),
    "scaled down": lambda: nn.Sequential(cayley(), Times(1 - 1e-6)),
    "plain": lambda: nn.Conv2d(3, 3, 3, padding="same", padding_mode="circular", dtype=torch.float64),
    "zero padding": lambda: zero_padded(cayley()),
}
EXPANSIVE = {
    "scaled up": WRONG["scaled up"],
    "large": lambda: Times(2.0),
    "sum with the input": lambda: lambda x: x + x.flip(-1),
}


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def zero_padded(layer: CayleyConv2d) -> nn.Conv2d:
    """The taps of an orthogonal circular convolution, used with padding by zeros."""
    from orthoconv import fourier

    conv = nn.Conv2d(3, 3, (5, 5), padding="same", dtype=torch.float64)
    conv.weight.data = fourier.kernel_of(layer.spectrum((5, 5)), (5, 5))
    return conv


def test_right_layers_pass() -> None:
    assert_orthogonal(cayley(), SHAPE)
    assert_nonexpansive(cayley(), SHAPE)
    assert orthogonality_error(cayley(), SHAPE) < 1e-13
    assert_orthogonal(torch.eye(4, 2))
    assert_nonexpansive(torch.eye(4) / 2)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers_are_not_orthogonal(name: str) -> None:
    layer = WRONG[name]()
    with pytest.raises(AssertionError, match="not orthogonal: singular values in"):
        assert_orthogonal(layer, SHAPE)
    assert orthogonality_error(layer, SHAPE) > 5e-7


@pytest.mark.parametrize("name", EXPANSIVE)
def test_expansive_layers_are_caught(name: str) -> None:
    layer = EXPANSIVE[name]()
    with pytest.raises(AssertionError, match="expansive: largest singular value"):
        assert_nonexpansive(layer, SHAPE)


def test_not_a_number_is_never_orthogonal() -> None:
    with pytest.raises(AssertionError, match="non-finite entries"):
        assert_orthogonal(lambda x: x * float("nan") if x.any() else x, (2, 2))


def test_dense_matrix_of_a_linear_layer() -> None:
    layer = nn.Linear(3, 2)
    torch.testing.assert_close(dense_matrix(layer, (3,)), layer.weight.detach())


def test_dense_matrix_in_pieces() -> None:
    layer = nn.Linear(1500, 2, bias=False)
    torch.testing.assert_close(dense_matrix(layer, (1500,)), layer.weight.detach())


def test_norm_ratios_ignore_the_bias() -> None:
    layer = cayley()
    layer.bias.data.fill_(100.0)
    x = torch.randn(4, *SHAPE, dtype=torch.float64)
    torch.testing.assert_close(norm_ratios(layer, x), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(norm_ratios(Times(3.0), x), torch.full((4,), 3.0, dtype=torch.float64))


def test_a_layer_needs_an_input_shape() -> None:
    with pytest.raises(ValueError, match="input_shape is needed"):
        orthogonality_error(cayley())


@pytest.mark.parametrize(
    "layer",
    [
        CayleyConv2d(3, 5, 3, dtype=torch.float64),
        CayleyConv2d(3, 2, 3, dtype=torch.float64, padding_mode="zeros"),
        RKOConv2d(3, 4, 3, dtype=torch.float64),
        CPLConv2d(3, 3, 3, dtype=torch.float64),
        MaxMin(dim=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_keep_the_contract(layer: nn.Module) -> None:
    check_layer(layer, (3, 4, 4))


class TooSmallABound(CayleyLinear):
    def lipschitz(self, shape: object) -> float:
        return 0.999


class Expanding(CayleyLinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * super().forward(x)

    def lipschitz(self, shape: object) -> float:
        return 1.001

    def in_double(self) -> nn.Module:
        return self


class Contracting(Expanding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.999 * CayleyLinear.forward(self, x)


class AnotherCopy(CayleyLinear):
    def in_double(self) -> nn.Module:
        return nn.Linear(6, 4, dtype=torch.float64)


class OtherValues(CayleyLinear):
    def singular_values_for(self, shape: object) -> torch.Tensor:
        return torch.full((4,), 0.5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TooSmallABound, "the bound 0.999 is too small"),
        (AnotherCopy, r"in_double\(\) computes something else"),
        (OtherValues, "singular_values_for says something else"),
    ],
)
def test_a_broken_contract_is_seen(kind: type[nn.Module], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layer(kind(6, 4, dtype=torch.float64), (6,))


@pytest.mark.parametrize(("kind", "message"), [(Expanding, "and expands"), (Contracting, "orthogonal, and is not")])
def test_a_broken_promise_is_seen(kind: type[nn.Module], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "exported", lambda self, shape: self)
    with pytest.raises(AssertionError, match=message):
        check_layer(kind(6, 4, dtype=torch.float64), (6,))
