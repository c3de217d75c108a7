"""Convolutions of sequences: the contract of tests/contract.py on images of one row, and what is around it."""

from dataclasses import dataclass
from typing import Any

import pytest
import test_contract as checks
import torch
from contract import Case, Contract, _with, cayley_matrix, polar, reflection, skew_exponential, spectral_matrix
from torch import Tensor, nn

from orthoconv import certify, export, in_double, lipschitz_bound, orthogonal, rounding_bound, verify
from orthoconv.nn import (
    AOCConv2d,
    BROConv1d,
    CayleyConv1d,
    CayleyConv2d,
    LOTConv1d,
    MaxMin,
    SequenceConv1d,
    SOCConv1d,
    conv_methods,
)
from orthoconv.nn.methods import find_layer


def case(i: int, o: int, k: int, n: int, **options: Any) -> Case:
    """A case of the contract: an image of one row, whose stride and dilation are pairs for the oracles."""
    return Case(i, o, (1, k), (1, n), {name: (1, v) if name == "stride" else v for name, v in options.items()})


CASES = [
    case(3, 3, 3, 8),
    case(2, 5, 3, 7),
    case(5, 2, 4, 6),
    case(3, 2, 1, 5),
    case(3, 3, 7, 4),
    case(4, 4, 3, 1),
    case(2, 4, 3, 9, bias=False),
    case(2, 8, 3, 8, stride=2),
    case(1, 4, 7, 9, stride=3),
    case(4, 6, 3, 5, groups=2),
    case(2, 3, 3, 8, dilation=2),
    case(2, 4, 4, 8, dilation=3, stride=2),
    case(2, 4, 3, 70),  # beyond the dense transform
]
CORE = {1, 8, 9}


@dataclass(frozen=True)
class Lines(Contract):
    """A contract whose layer takes sequences."""

    def layer(self, case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
        own = {name: v[1] if name == "stride" else v for name, v in case.options.items()}
        k = case.k[1] if isinstance(case.k, tuple) else case.k
        return self.build(case.i, case.o, k, **own, **options, dtype=dtype)

    def input_shape(self, case: Case) -> tuple[int, ...]:
        return (case.i, case.size[1])


LAYERS = {
    "CayleyConv1d": Lines(CayleyConv1d, "orthogonal", cayley_matrix),
    "CayleyConv1d signs": Lines(_with(CayleyConv1d, signs="random"), "orthogonal", cayley_matrix),
    "LOTConv1d": Lines(LOTConv1d, "orthogonal", lambda *args: spectral_matrix(*args, polar)),
    "BROConv1d": Lines(BROConv1d, "orthogonal", lambda *args: spectral_matrix(*args, reflection)),
    "SOCConv1d": Lines(SOCConv1d, "orthogonal", lambda *args: spectral_matrix(*args, skew_exponential)),
}
every_layer = pytest.mark.parametrize("contract", LAYERS.values(), ids=LAYERS.keys())


def marks(name: str, k: int) -> list[pytest.MarkDecorator]:
    return [] if k in CORE or (name == "CayleyConv1d" and k in (2, 5, 10, 12)) else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("contract", "case"),
    [
        pytest.param(contract, c, id=f"{name}-{c}", marks=marks(name, k))
        for name, contract in LAYERS.items()
        for k, c in enumerate(CASES)
    ],
)
def test_contract(contract: Contract, case: Case) -> None:
    lifts = contract.build is BROConv1d and case.size[1] > 64  # in training alone, so to rounding
    for check in checks.CHECKS:
        if check is checks.check_modes_agree and lifts:
            layer, x = contract.layer(case), checks.images(contract, case)
            torch.testing.assert_close(layer(x), layer.eval()(x))
        else:
            check(contract, case)


@every_layer
@pytest.mark.parametrize("mode", ["fast", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("train", "eval"))])
def test_gradients(contract: Contract, mode: str) -> None:
    """All Jacobians in full are slow; the quick suite multiplies them by random vectors."""
    fast, mode = mode == "fast", "train" if mode == "fast" else mode
    checks.test_gradients(contract, case(2, 3, 3, 4), mode, fast=fast)
    if isinstance(contract.build, type):
        checks.test_gradients(contract, case(2, 2, 2, 4, stride=2, groups=2), mode, fast=fast)


@every_layer
def test_a_wrong_layer_is_caught(contract: Contract) -> None:
    layer, c = contract.layer(CASES[0]), CASES[0]
    other = contract.layer(c)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(checks.dense_matrix(layer, (3, 8)), contract.oracle(other, c))


def network(**options: Any) -> nn.Module:
    return nn.Sequential(
        CayleyConv1d(2, 8, 5, stride=2, **options),
        MaxMin(dim=1),
        CayleyConv1d(8, 8, 3, padding=1, groups=2, padding_mode="zeros", **options),
        MaxMin(dim=1),
        nn.Flatten(),
        orthogonal(nn.Linear(64, 3, **options)),
    )


def test_certificates_rounding_verification() -> None:
    model, x = network().eval(), torch.randn(16, 2, 16)
    assert 0.999 < lipschitz_bound(model, (2, 16)) < 1 + 1e-5
    exact = in_double(model)(x.double())
    assert torch.dist(exact, model(x).double()) < 1e-5
    norm = x.flatten(1).norm(dim=1).max().item()
    assert (exact - model(x)).norm(dim=1).max() <= rounding_bound(model, (2, 16), norm)
    assert not verify(model, x, claimed=1.0).faults
    labels = exact.argmax(1)
    certificates = certify(model, [(x, labels)])
    assert (certificates.radius > 0).all()
    margins = exact.sort(1).values
    assert (certificates.radius <= (margins[:, -1] - margins[:, -2]) / 2**0.5).all()


@every_layer
def test_export(contract: Contract) -> None:
    for c in (case(3, 4, 3, 8), case(2, 8, 4, 8, stride=2), case(3, 4, 1, 5)):
        for options in ({}, {"padding_mode": "zeros"}):
            layer = contract.layer(c, torch.float32, **options).eval()
            x = torch.randn(4, *contract.input_shape(c))
            plain = export(layer, x.shape[1:])
            assert not any(isinstance(m, SequenceConv1d) for m in plain.modules())
            torch.testing.assert_close(plain(x), layer(x), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_onnx(tmp_path) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    from orthoconv import to_onnx

    model, x = network().eval(), torch.randn(4, 2, 16)
    to_onnx(model, x, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"stride": 2}, {"groups": 2}], ids=str)
def test_padding_by_zeros_is_a_part_of_the_line(options: dict) -> None:
    """The layer on a sequence is the circular one on a longer sequence, which is zero elsewhere."""
    layer = CayleyConv1d(2, 4, 4, padding_mode="zeros", bias=False, dtype=torch.float64, **options)
    circle = CayleyConv1d(2, 4, 4, bias=False, dtype=torch.float64, **options)
    circle.load_state_dict(layer.state_dict())
    x, s = torch.randn(3, 2, 8, dtype=torch.float64), options.get("stride", 1)
    taps = max(1, 4 // s)
    more = s * options.get("dilation", 1) * (taps - 1)
    torch.testing.assert_close(layer(x), circle(nn.functional.pad(x, (0, more)))[..., : 8 // s])
    assert layer.promise == "nonexpansive"
    assert layer.singular_values_for((2, 8)) is None


def test_is_the_layer_of_images_of_one_row() -> None:
    line, image = CayleyConv1d(3, 8, 5, stride=2), CayleyConv2d(3, 8, (1, 5), stride=(1, 2))
    image.load_state_dict(line.state_dict())
    x = torch.randn(2, 3, 12)
    assert torch.equal(line(x), image(x[:, :, None])[:, :, 0])
    assert torch.equal(line(x[0]), image(x[0, :, None])[:, 0])


def test_takes_the_place_of_torch() -> None:
    for conv in (
        nn.Conv1d(4, 8, 5, padding=2),
        nn.Conv1d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.Conv1d(4, 4, 3, padding="same", dilation=2, padding_mode="circular", bias=False),
    ):
        for keep in (False, True):
            layer = orthogonal(conv, keep_weights=keep)
            assert type(layer) is CayleyConv1d
            assert layer(torch.randn(2, 4, 12)).shape == conv(torch.randn(2, 4, 12)).shape
    with pytest.raises(ValueError, match="'aoc' has no convolution of sequences; 'bro', 'cayley', 'lot', 'soc'"):
        orthogonal(nn.Conv1d(4, 8, 3, padding=1), "aoc")
    for name in ("bro", "lot", "soc"):
        assert type(orthogonal(nn.Conv1d(4, 8, 3, padding=1), name)) is find_layer(name, "conv1d")
    assert CayleyConv1d.from_conv(nn.Conv1d(3, 3, 1), keep_weights=True).replaces is nn.Conv1d
    with pytest.raises(RuntimeError, match=r"nn\.Conv1d, .*CayleyConv1d\.from_conv"):
        CayleyConv1d(3, 8, 3).load_state_dict(nn.Conv1d(3, 8, 3).state_dict())
    assert "conv1d" not in conv_methods()


def test_other_methods_by_one_line() -> None:
    class AOCConv1d(SequenceConv1d, AOCConv2d):
        pass

    layer = AOCConv1d(2, 4, 3, dtype=torch.float64)
    checks.assert_orthogonal(layer, (2, 6), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": (3, 3)}, r"kernel_size must be an int of at least 1, or a sequence of one, got \(3, 3\)"),
        ({"kernel_size": 0}, "kernel_size must be .*got 0"),
        ({"kernel_size": 3, "stride": True}, "stride must be .*got True"),
        ({"kernel_size": 3, "padding": 0}, r"CayleyConv1d convolves images of one row, and padding must be"),
        ({"kernel_size": 3, "padding_mode": "reflect"}, "must be .*got 'reflect'"),
        ({"kernel_size": 3, "groups": 2}, "groups must divide"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CayleyConv1d(3, 3, **options)


def test_bad_inputs() -> None:
    layer = CayleyConv1d(3, 4, 3, stride=2)
    for shape in [(3, 3), (2, 3, 7), (2, 4, 8), (2, 3, 1, 8), (8,), (2, 3, 0)]:
        with pytest.raises(ValueError, match=r"takes sequences of shape|multiples of its stride"):
            layer(torch.randn(shape))
    with pytest.raises(TypeError, match="float64"):
        layer(torch.randn(2, 3, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="takes sequences"):
        layer.inverse(torch.randn(2, 3, 4))


def test_transforms_of_torch() -> None:
    layer, x = CayleyConv1d(2, 3, 3, dtype=torch.float64), torch.randn(4, 2, 6, dtype=torch.float64)

    def run(one: Tensor) -> Tensor:
        y: Tensor = layer(one)
        return y

    torch.testing.assert_close(torch.func.vmap(run)(x), layer(x))
    jacobian = torch.func.jacrev(run)(x[0]).reshape(18, 12)
    torch.testing.assert_close(jacobian, checks.dense_matrix(layer, (2, 6)))
