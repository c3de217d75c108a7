"""One contract for every convolution (tests/contract.py), checked on dense matrices in float64 and float32."""

import copy
import io
import math
import pickle

import pytest
import safetensors.torch
import torch
from contract import CASES, CORE, LAYERS, OF_VARIANTS, Case, Contract
from torch import Tensor, nn

from orthoconv import frozen
from orthoconv.testing import assert_nonexpansive, assert_orthogonal, dense_matrix, norm_ratios

EPS = torch.finfo(torch.float64).eps
SLOW = pytest.mark.slow


def is_variant(name: str) -> bool:
    """Whether a layer is another one transposed, or with an option."""
    return "Transpose" in name or " " in name


every_layer = pytest.mark.parametrize("contract", LAYERS.values(), ids=LAYERS.keys())
every_pair = pytest.mark.parametrize(
    ("contract", "case"),
    [
        pytest.param(
            contract, case, id=f"{case}-{name}",
            marks=[] if name == "CayleyConv2d" or k in (OF_VARIANTS if is_variant(name) else CORE) else [SLOW],
        )
        for name, contract in LAYERS.items()
        for k, case in enumerate(CASES)
        if contract.takes(case)
    ],
)  # fmt: skip
GRADIENT_CASES = [
    Case(2, 2, 3, (2, 3)),
    Case(1, 2, 2, (2, 4), {"stride": 2}),
    Case(1, 2, 2, (2, 3)),
    Case(2, 1, 3, (3, 2)),
    Case(2, 2, 3, (3, 2), {"groups": 2}),
    Case(2, 2, 1, (2, 2)),
]


def gradient_marks(name: str, k: int, mode: str) -> list[pytest.MarkDecorator]:
    """In eval mode, where the graph is that of training, the slow suite has one case of layers other than Cayley."""
    if name == "CayleyConv2d":
        return [] if k == 0 or (k == 1 and mode == "train") else [SLOW]
    return [SLOW] if k == 0 or mode == "train" else [pytest.mark.long]


def gradient_cases(layers: dict[str, Contract]) -> pytest.MarkDecorator:
    """Every layer, case and mode, with all Jacobians in full.

    The quick suite has two cases of Cayley. In the other cases, and in one of each layer that is not transposed,
    fast_mode multiplies each Jacobian by random vectors there.
    """
    full = [
        pytest.param(
            contract, case, mode, False, id=f"{case}-{mode}-{name}",
            marks=gradient_marks(name, k, mode),
        )
        for name, contract in layers.items()
        for k, case in enumerate(GRADIENT_CASES)
        for mode in ("train", "eval")
    ]  # fmt: skip
    fast = [
        pytest.param(contract, case, "train", True, id=f"fast-{case}-{name}")
        for name, contract in layers.items()
        for case in (GRADIENT_CASES[2:] if name == "CayleyConv2d" else GRADIENT_CASES[:1])
        if "Transpose" not in name
    ]
    return pytest.mark.parametrize(("contract", "case", "mode", "fast"), full + fast)


def images(contract: Contract, case: Case, b: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(b, *contract.input_shape(case), dtype=dtype)


def check_equals_the_dense_oracle(contract: Contract, case: Case) -> None:
    layer = contract.layer(case)
    expected = contract.oracle(layer, case)
    assert torch.dist(dense_matrix(layer, contract.input_shape(case)), expected) <= 100 * EPS * len(expected)


def check_guarantee_holds_in_float64(contract: Contract, case: Case) -> None:
    layer, shape = contract.layer(case), contract.input_shape(case)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(10)
    if contract.guarantee == "orthogonal":
        assert_orthogonal(layer, shape, atol=1e-12)
    elif contract.guarantee == "nonexpansive":
        assert_nonexpansive(layer, shape, atol=1e-12)


def check_guarantee_holds_in_float32(contract: Contract, case: Case) -> None:
    layer, shape = contract.layer(case, torch.float32), contract.input_shape(case)
    matrix = dense_matrix(layer, shape).double()
    atol = 2e-6 * math.sqrt(max(case.inner_channels))
    if contract.guarantee == "orthogonal":
        assert_orthogonal(matrix, atol=atol)
    elif contract.guarantee == "nonexpansive":
        assert_nonexpansive(matrix, atol=atol)


def check_isometries_keep_the_norm_and_have_an_inverse(contract: Contract, case: Case) -> None:
    layer, x = contract.layer(case), images(contract, case)
    if contract.is_isometry(case):
        torch.testing.assert_close(norm_ratios(layer, x), torch.ones(3, dtype=torch.float64), atol=1e-13, rtol=0)
        y = layer(x)
        torch.testing.assert_close(layer.inverse(y), x)
        torch.testing.assert_close(layer.inverse(y[0]), x[0])
    elif hasattr(layer, "inverse"):
        with pytest.raises(ValueError, match="has no inverse"):
            layer.inverse(layer(x))


def check_singular_values_are_those_of_the_matrix(contract: Contract, case: Case) -> None:
    layer, shape = contract.layer(case), contract.input_shape(case)
    found = layer.singular_values(shape[1:]).flatten().sort().values
    expected = torch.linalg.svdvals(dense_matrix(layer, shape)).sort().values
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def check_modes_agree(contract: Contract, case: Case) -> None:
    layer, x = contract.layer(case), images(contract, case)
    trained = layer(x)
    with frozen(layer):
        assert torch.equal(layer(x), trained)
        assert torch.equal(layer(x), trained)
    assert torch.equal(layer.eval()(x), trained)
    assert torch.equal(layer(x), trained)
    torch.testing.assert_close(layer(x[0]), trained[0])


def check_parameters_are_complete_before_the_first_pass(contract: Contract, case: Case) -> None:
    layer = contract.layer(case)
    before = {k: v.shape for k, v in layer.state_dict().items()}
    layer(images(contract, case)).square().sum().backward()
    layer.eval()(images(contract, case))
    assert {k: v.shape for k, v in layer.state_dict().items()} == before
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


CHECKS = [
    check_equals_the_dense_oracle,
    check_guarantee_holds_in_float64,
    check_guarantee_holds_in_float32,
    check_isometries_keep_the_norm_and_have_an_inverse,
    check_singular_values_are_those_of_the_matrix,
    check_modes_agree,
    check_parameters_are_complete_before_the_first_pass,
]


@every_pair
def test_contract(contract: Contract, case: Case) -> None:
    for check in CHECKS:
        torch.manual_seed(0)
        check(contract, case)


@every_layer
def test_round_trips(contract: Contract) -> None:
    case = Case(2, 4, 3, (4, 6), {"stride": (2, 1)})
    layer, x = contract.layer(case).eval(), images(contract, case)
    y = layer(x)

    other = contract.layer(case).eval()
    assert not torch.equal(other(x), y)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), y)

    other = contract.layer(case).eval()
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(layer.state_dict())))
    assert torch.equal(other(x), y)

    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), y)


@gradient_cases(LAYERS)
def test_gradients(contract: Contract, case: Case, mode: str, fast: bool) -> None:
    layer = contract.layer(case, **contract.gradient_options).train(mode == "train")
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    inputs = (images(contract, case, b=2).requires_grad_(), *(p.detach().requires_grad_() for p in parameters))
    torch.autograd.gradcheck(run, inputs, fast_mode=fast)
    if contract.second_order:
        torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@every_layer
def test_one_instance_serves_every_size(contract: Contract) -> None:
    layer = contract.layer(Case(3, 3, 3, (4, 4)))
    sizes = [(4, 4), (5, 7), (1, 3), (8, 2), (4, 4), (5, 7)]
    expected = {size: contract.oracle(layer, Case(3, 3, 3, size)) for size in sizes}
    for mode in (True, False):
        layer.train(mode)
        for size in sizes:
            matrix = dense_matrix(layer, (3, *size))
            assert torch.dist(matrix, expected[size]) <= 100 * EPS * len(matrix), (mode, size)


@every_layer
def test_empty_batch(contract: Contract) -> None:
    layer = contract.layer(Case(3, 3, 3, (4, 4)))
    x = torch.zeros(0, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 3, 4, 4)
    y.sum().backward()


@every_layer
def test_contract_catches_a_wrong_layer(contract: Contract) -> None:
    """The negative control: the same layer, its output scaled by 1 + 1e-9, must not pass."""
    case = CASES[0]
    layer = contract.layer(case)
    wrong = nn.Sequential(layer, Scaled(1 + 1e-9))
    matrix, expected = dense_matrix(wrong, contract.input_shape(case)), contract.oracle(layer, case)
    assert not torch.dist(matrix, expected) <= 100 * EPS * len(expected)
    if contract.guarantee == "orthogonal":
        with pytest.raises(AssertionError, match="not orthogonal"):
            assert_orthogonal(wrong, contract.input_shape(case), atol=1e-12)


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x
