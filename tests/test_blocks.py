"""Blocks x - U* relu(U x + b), which are not linear: dense oracles, Jacobians, certificates, negative controls."""

import math
from pathlib import Path

import pytest
import test_contract as suite
import torch
from contract import BLOCKS, CASES, Case, Contract
from oracles import downsample_matrix
from torch import Tensor, nn

from orthoconv import certify, export, fourier, lipschitz_bound, models, rounding_bound, to_onnx, verify
from orthoconv.attacks import cross_examine
from orthoconv.certificates import in_double
from orthoconv.certificates.heads import split_head
from orthoconv.data import load
from orthoconv.nn import CholeskyLinear, CPLConv2d, CPLLinear, LiResConv2d, MaxMin, SLLConv2d, SLLLinear
from orthoconv.nn.gram import norm_bounds
from orthoconv.testing import assert_nonexpansive

EPS = torch.finfo(torch.float64).eps
every_block = pytest.mark.parametrize("contract", BLOCKS.values(), ids=BLOCKS.keys())
every_case = pytest.mark.parametrize("case", CASES, ids=str)
SOME = [CASES[k] for k in (0, 1, 2, 6, 14, 19, 22, 23)]
LINEAR = [CPLLinear, SLLLinear]


def selection(groups: int, channels: int, kept: int, pixels: int) -> Tensor:
    """Matrix that appends channels of zeros to each group of `kept` channels."""
    one = torch.eye(channels * pixels, kept * pixels, dtype=torch.float64)
    return torch.block_diag(*[one] * groups)


def dense_block(layer: nn.Module, U: Tensor, x: Tensor, n: int) -> Tensor:
    """The whole map of vectors (b, inputs), by dense matrices, on n pixels."""
    o, i, g = layer.kernel_shape[0] // layer.groups, layer.kernel_shape[1], layer.groups
    c = max(i, o)
    bias = 0 if layer.bias is None else layer.bias.detach().repeat_interleave(n)
    z = x @ selection(g, c, i, n).mT
    return (z - (z @ U.mT + bias).relu() @ U) @ selection(g, c, o, n)


def spread(layer: nn.Module, scale: float = 1.0) -> nn.Module:
    """The layer with other parameters than at the start, of that scale."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1 if name in {"log_q", "gate"} else scale))
    return layer


@every_block
@every_case
def test_equals_the_dense_map(contract: Contract, case: Case) -> None:
    layer, x = spread(contract.layer(case)), suite.images(contract, case)
    n = math.prod(case.inner_size)
    y = x.flatten(1) @ downsample_matrix(case.i, case.size, case.stride).mT
    expected = dense_block(layer, contract.oracle(layer, case.inner_size), y, n)
    torch.testing.assert_close(layer(x).flatten(1), expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(in_double(layer)(x).flatten(1), expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(export(layer, x.shape[1:])(x).flatten(1), expected, atol=1e-11, rtol=0)


@every_block
@pytest.mark.parametrize("case", [Case(3, 3, 3, (4, 5)), Case(2, 5, 2, (3, 4)), Case(5, 2, 3, (4, 4))], ids=str)
def test_padding_by_zeros_takes_a_part_of_the_convolution_on_a_larger_torus(contract: Contract, case: Case) -> None:
    layer = spread(contract.layer(case, padding_mode="zeros"))
    x, (h, w) = suite.images(contract, case), case.size
    H, W = h + case.k - 1, w + case.k - 1
    U = contract.oracle(layer, (H, W)).unflatten(0, (-1, H, W)).unflatten(3, (-1, H, W))
    part = U[:, :h, :w, :, :h, :w].flatten(3).flatten(0, 2)
    expected = dense_block(layer, part, x.flatten(1), h * w).view(len(x), case.o, h, w)
    torch.testing.assert_close(layer(x), expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(in_double(layer)(x), expected, atol=1e-11, rtol=0)
    torch.testing.assert_close(export(layer, x.shape[1:])(x), expected, atol=1e-11, rtol=0)
    J = torch.autograd.functional.jacobian(layer, x[:1])
    assert_nonexpansive(J.view(expected[0].numel(), -1), atol=1e-12)


@every_block
@pytest.mark.parametrize(
    ("case", "scale"),  # the quick suite has half of the cases with small weights, and half with large ones
    [
        pytest.param(case, scale, id=f"{case}-{scale}", marks=[] if scale == (1e-3, 1e3)[k % 2] else [pytest.mark.slow])
        for k, case in enumerate(SOME)
        for scale in (1e-3, 1.0, 1e3)
    ],
)
def test_norm_is_at_most_1_for_weights_of_any_scale(contract: Contract, case: Case, scale: float) -> None:
    layer, shape = spread(contract.layer(case), scale), contract.input_shape(case)
    U = contract.oracle(layer, case.inner_size)
    assert torch.linalg.eigvalsh(2 * torch.eye(len(U), dtype=U.dtype) - U @ U.mT).min() >= -1e-12
    for k in range(2):
        J = torch.autograd.functional.jacobian(layer, scale**k * torch.randn(1, *shape, dtype=torch.float64))
        assert_nonexpansive(J.reshape(-1, torch.Size(shape).numel()), atol=1e-12)
    assert 1 <= layer.lipschitz(shape) <= 1 + 1e-12
    assert layer.float().lipschitz(shape) <= 1 + 2e-6


@every_block
def test_the_bound_is_that_of_the_operator_as_it_is(contract: Contract) -> None:
    """The negative control: the promise is measured from U, and a U that is too large is found."""
    layer, x = contract.layer(CASES[0]).eval(), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    U = layer.cached_operator((4, 4)).detach()

    class TooLarge(type(layer)):
        def transform(self, size, *sources):
            return 1.1 * super().transform(size, *sources)

    larger = TooLarge(3, 3, 3, hidden=layer.hidden, dtype=torch.float64).eval()
    larger.load_state_dict(layer.state_dict())
    norm = fourier.singular_values(1.1 * U, (4, 4)).max().item()
    expected = max(1.0, norm**2 - 1)
    assert larger.lipschitz((3, 4, 4)) == pytest.approx(expected, rel=1e-12)
    found = verify(larger, x)
    assert bool(found.faults) == (expected > 1 + 1e-5)
    assert isinstance(contract.layer(CASES[0]), CPLConv2d) <= bool(found.faults)


def test_a_power_iterate_in_place_of_the_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_iteration(D: Tensor, squarings: int) -> Tensor:
        v = D.mH @ torch.ones(D.shape[-2], 1, dtype=D.dtype)
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
        return torch.linalg.vector_norm(D @ v, dim=-2)[..., 0].amax(1)

    monkeypatch.setattr("orthoconv.nn.cpl.norm_bounds", one_iteration)
    layer = CPLConv2d(4, 4, 3, dtype=torch.float64).eval()
    assert layer.lipschitz((4, 5, 5)) > 1.01
    assert any(
        "promises to be nonexpansive" in fault for fault in verify(layer, torch.rand(2, 4, 5, 5).double()).faults
    )
    U = layer.cached_operator((5, 5)).detach()
    assert fourier.singular_values(U, (5, 5)).max() ** 2 > 2 + 1e-12


@every_block
@pytest.mark.parametrize("case", SOME, ids=str)
def test_contract_checks_that_need_no_matrix(contract: Contract, case: Case) -> None:
    suite.check_modes_agree(contract, case)
    suite.check_parameters_are_complete_before_the_first_pass(contract, case)


@every_block
def test_round_trips_and_empty_batches(contract: Contract) -> None:
    suite.test_round_trips(contract)
    suite.test_empty_batch(contract)


@suite.gradient_cases(BLOCKS)
def test_gradients(contract: Contract, case: Case, mode: str, fast: bool) -> None:
    suite.test_gradients(contract, case, mode, fast)


@pytest.mark.slow
@every_block
@pytest.mark.parametrize("options", [{"identity": True}, {"hidden": 7}, {"hidden": 7, "identity": True}], ids=str)
def test_gradients_with_options(contract: Contract, options: dict[str, int]) -> None:
    case = Case(2, 2, 3, (2, 3), options)
    suite.test_gradients(contract, case, "train", fast=False)
    layer = contract.layer(case)
    assert len(layer.weight) == options.get("hidden", 2)  # the contract asks for as many rows as channels
    assert layer.lipschitz((2, 2, 3)) <= 1 + 1e-12


@every_block
def test_the_identity_start(contract: Contract) -> None:
    for i, o in ((4, 4), (3, 6), (6, 3)):
        layer = contract.layer(Case(i, o, 3, (6, 6)), identity=True)
        x = torch.randn(2, i, 6, 6, dtype=torch.float64)
        kept = nn.functional.pad(x, (0, 0, 0, 0, 0, max(0, o - i)))[:, :o]
        assert torch.dist(layer(x), kept) < 0.1 * torch.linalg.vector_norm(x)
        assert torch.dist(contract.layer(Case(i, o, 3, (6, 6)))(x), kept) > torch.dist(layer(x), kept)


@pytest.mark.parametrize("zeros", [slice(1, 2), slice(None)], ids=["row", "all"])
@pytest.mark.parametrize(
    "build", [lambda: CPLConv2d(3, 3, 3), lambda: SLLConv2d(3, 3, 3), *(lambda c=c: c(3, 3) for c in LINEAR)]
)
def test_zero_rows_stay_zero_and_have_finite_gradients(build, zeros: slice) -> None:
    layer = build()
    with torch.no_grad():
        layer.weight[zeros] = 0
    x = torch.randn((2, 3, 5, 4) if layer.weight.ndim == 4 else (2, 3), requires_grad=True)
    layer(x).square().sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, *layer.parameters()))
    assert (layer.cached_operator((5, 4))[zeros] == 0).all()


@pytest.mark.parametrize("spread_of_q", [1.0, 30.0, 300.0])
def test_extreme_weights_of_sll_are_sound(spread_of_q: float) -> None:
    for dtype, excess in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        layer = SLLConv2d(6, 6, 3, hidden=6, dtype=dtype)
        with torch.no_grad():
            layer.log_q.copy_(spread_of_q * torch.randn(6))
            layer.weight.mul_(torch.logspace(0, -8, 6)[:, None, None, None])
        assert layer.lipschitz((6, 5, 5)) <= 1 + excess
        layer(torch.randn(1, 6, 5, 5, dtype=dtype)).sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("shape", [(1, 7, 5, 8), (2, 3, 6, 4), (1, 1, 9, 9)])
@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
def test_norm_bounds_are_upper_bounds_and_tight(shape: tuple[int, ...], kind: torch.dtype) -> None:
    for scale in (1e-3, 1.0, 1e3):
        D = scale * torch.randn(shape, dtype=kind)
        exact = torch.linalg.svdvals(D)[..., 0].amax(1)
        bounds = norm_bounds(D, 6)
        assert (bounds >= exact).all()
        assert (bounds <= 1.02 * exact).all()
        assert (norm_bounds(D, 0) >= bounds).all()
    D = torch.randn(shape, dtype=kind, requires_grad=True)
    torch.autograd.gradcheck(lambda D: norm_bounds(D, 3), D, fast_mode=True)
    torch.autograd.gradgradcheck(lambda D: norm_bounds(D, 3), D, fast_mode=True)
    every = torch.func.vmap(lambda D: norm_bounds(D, 6))(D.detach()[None])[0]  # without leaving frequencies out
    torch.testing.assert_close(norm_bounds(D.detach(), 6), every, rtol=1e-13, atol=0)


@pytest.mark.parametrize("cls", LINEAR)
@pytest.mark.parametrize(("i", "o"), [(5, 5), (3, 7), (7, 3)])
def test_linear_blocks(cls: type[nn.Module], i: int, o: int) -> None:
    layer, x = spread(cls(i, o, dtype=torch.float64)), torch.randn(4, i, dtype=torch.float64)
    W, c = layer.weight.detach(), max(i, o)
    if cls is CPLLinear:
        p = 2 * 2**layer.squarings + 2
        U = 2**0.5 * W / torch.linalg.svdvals(W).pow(p).sum().pow(1 / p)
    else:
        q = layer.log_q.detach().exp()
        U = (2 / ((W @ W.mT).abs() @ q / q)).sqrt()[:, None] * W
    z = nn.functional.pad(x, (0, c - i))
    expected = (z - (z @ U.mT + layer.bias).relu() @ U)[:, :o]
    for module in (layer, in_double(layer), export(layer, (i,))):
        torch.testing.assert_close(module(x), expected, atol=1e-12, rtol=0)
    J = torch.autograd.functional.jacobian(layer, x[0])
    assert_nonexpansive(J, atol=1e-12)
    assert 1 <= layer.lipschitz() <= 1 + 1e-12
    names, parameters = zip(*layer.named_parameters(), strict=True)
    inputs = (x.clone().requires_grad_(), *(v.detach().requires_grad_() for v in parameters))

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    torch.autograd.gradcheck(run, inputs)
    torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_a_block_at_the_end_is_no_linear_head() -> None:
    model = nn.Sequential(nn.Flatten(), CPLLinear(8, 4), MaxMin(), CPLLinear(4, 3))
    assert split_head(model) is None
    assert split_head(nn.Sequential(CPLLinear(8, 4), CholeskyLinear(4, 3))) is not None


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize(
    "layer", [CPLConv2d(3, 5, 3), SLLConv2d(4, 2, 2, stride=2), CPLLinear(20, 10), SLLLinear(9, 12)], ids=str
)
def test_rounding_is_bounded(layer: nn.Module, bias: float) -> None:
    spread(layer)
    nn.init.constant_(layer.bias, bias)
    shape = (layer.in_features,) if hasattr(layer, "in_features") else (layer.in_channels, 6, 6)
    for size in (1e-3, 1.0, 1e3):
        x = size * torch.randn(64, *shape)
        error = (layer.eval()(x).double() - in_double(layer)(x.double())).flatten(1).norm(dim=1).max()
        assert error <= rounding_bound(layer, shape, float(x.flatten(1).norm(dim=1).max()))
        assert error > 0 or bias < 0  # then the block may be the identity


@pytest.mark.parametrize("method", ["cpl", pytest.param("sll", marks=pytest.mark.slow), "lires"])
def test_networks_and_certificates(method: str) -> None:
    model = models.build("kwlarge", method, width=0.125, in_channels=1, image_size=8).eval()
    x = load("digits")[1].images[:8]
    labels = model(x).argmax(1)
    bound = lipschitz_bound(model, x.shape[1:])
    found = certify(model, [(x, labels)])
    assert (bound < 1 + 1e-5) == (method != "lires")
    assert found.slack is not None
    assert 0 < found.slack.max() < 1e-4
    assert (found.radius > 0).any()
    assert not cross_examine(model.requires_grad_(False), x, labels, found.radius, iterations=10).any()
    assert verify(model, x, claimed=None if method == "lires" else 1.0).faults == []


@pytest.mark.slow
def test_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    layers = [CPLConv2d(1, 4, 3), MaxMin(), SLLConv2d(4, 6, 4, stride=2, padding_mode="zeros"), nn.Flatten()]
    model, x = nn.Sequential(*layers, SLLLinear(96, 8), CholeskyLinear(8, 3)).eval(), torch.rand(5, 1, 8, 8)
    to_onnx(model, x, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.tensor(logits), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("i", "o"), [(5, 5), (3, 7), (7, 3), (64, 16)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_cholesky_rows_are_nearly_orthogonal(i: int, o: int, scale: float) -> None:
    layer = CholeskyLinear(i, o, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.normal_().mul_(scale)
    X = layer.weight.detach() if o <= i else layer.weight.detach().mT
    U, s, _ = torch.linalg.svd(X, full_matrices=False)
    shrunk = s / (s.square() + 1e-3 * s.square().sum() / len(X)).sqrt()
    torch.testing.assert_close(layer.singular_values(), shrunk.sort(descending=True).values, rtol=1e-10, atol=0)
    S = (U * (s.square() + 1e-3 * s.square().sum() / len(X))) @ U.mT
    expected = torch.linalg.inv(torch.linalg.cholesky(S)) @ X
    torch.testing.assert_close(layer.cached_operator(), expected if o <= i else expected.mT, rtol=1e-9, atol=1e-12)
    if scale == 1 and i < 64:
        torch.autograd.gradcheck(lambda W: layer.operator((1, 1), W), layer.weight)
        torch.autograd.gradgradcheck(lambda W: layer.operator((1, 1), W), layer.weight)


@pytest.mark.parametrize("rank", [0, 1, 20, 64])
def test_cholesky_is_nonexpansive_in_float32_at_any_rank(rank: int) -> None:
    layer = CholeskyLinear(256, 64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, rank) @ (torch.logspace(0, -6, rank)[:, None] * torch.randn(rank, 256)))
    assert layer.lipschitz() <= 1 + 1e-6
    layer(torch.randn(2, 256)).square().sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_lires_starts_as_the_identity_plus_noise() -> None:
    assert LiResConv2d(8, 8, 3).lipschitz((8, 6, 6)) < 2
    assert LiResConv2d(8, 8, 3, gain=0.0).lipschitz((8, 6, 6)) == pytest.approx(1, rel=1e-12)
    assert LiResConv2d(8, 8, 3).promise is None
    assert LiResConv2d(4, 2, 3, stride=2, gain=0.0).lipschitz((4, 6, 6)) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CPLConv2d(2, 2, 3, hidden=0), "hidden must be a positive int, got 0"),
        (lambda: SLLConv2d(4, 4, 3, groups=2, hidden=3), "hidden must be a multiple of groups=2, got 3"),
        (lambda: CPLLinear(2, 2, hidden=1.5), "hidden must be a positive int, got 1.5"),
        (lambda: CPLConv2d(2, 2, 3, squarings=-1), "squarings must be an int from 0 to 10, got -1"),
        (lambda: CPLLinear(2, 2, squarings=True), "squarings must be an int from 0 to 10, got True"),
        (lambda: CholeskyLinear(2, 2, ridge=0.0), "ridge must be from 1e-4 to 1, got 0.0"),
        (lambda: LiResConv2d(2, 2, 3, depth=0), "depth must be a positive int, got 0"),
        (lambda: LiResConv2d(2, 2, 3, gain=math.nan), "gain must be a finite number, got nan"),
        (lambda: CPLConv2d(2, 2, 3)(torch.zeros(1, 3, 4, 4)), r"CPLConv2d takes images of shape \(b, 2, h, w\)"),
        (lambda: SLLConv2d(2, 2, 3, stride=2)(torch.zeros(1, 2, 5, 4)), "multiples of its stride"),
        (lambda: SLLLinear(2, 2)(torch.zeros(3)), r"SLLLinear takes inputs of shape \(..., 2\), got \(3,\)"),
    ],
)
def test_bad_input_is_refused(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_blocks_have_no_inverse_and_no_singular_values() -> None:
    for block in (CPLConv2d(2, 2, 3), SLLLinear(2, 2)):
        with pytest.raises(ValueError, match=f"{type(block).__name__} has no inverse: it may map two inputs to one"):
            block.inverse(torch.zeros(1, 2, 4, 4))
    one = CPLConv2d(1, 1, 1, bias=False, hidden=1)  # x - 2 relu(x), up to a sign of x
    torch.testing.assert_close(one(torch.full((1, 1, 2, 2), 3.0)), one(torch.full((1, 1, 2, 2), -3.0)))
    assert not hasattr(SLLConv2d(2, 2, 3), "singular_values")
    assert CPLConv2d(2, 2, 3).singular_values_for((2, 4, 4)) is None
