"""A new method is one class and one call: two toy methods, and everything that they get without another line."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_contract as suite
import torch
from contract import CASES, Case, Contract, grouped, kernel_matrix
from oracles import conv_matrix, downsample_matrix, polar
from torch import Tensor, nn

from orthoconv import certify, export, lipschitz_bound, models, register_method, to_onnx, verify
from orthoconv import nn as layers
from orthoconv.attacks import cross_examine
from orthoconv.data import load
from orthoconv.lab.benchmark import PANELS
from orthoconv.lab.cli import main
from orthoconv.nn import KernelConv2d, SpectralConv2d, WeightConv2d


class PolarConv2d(SpectralConv2d):
    """Spectral: the orthogonal matrix nearest to each matrix, by its singular vectors."""

    @staticmethod
    def orthogonalize(W: Tensor) -> Tensor:
        U, _, Vh = torch.linalg.svd(W, full_matrices=False)
        return U @ Vh


class FrobeniusConv2d(WeightConv2d):
    """By a bound: the kernel divided by sqrt(kh kw) times its Frobenius norm, which is never less than the norm."""

    guarantee = "nonexpansive"

    def set_up(self, *, power: float = 1.0) -> None:
        super().set_up()
        self.power = power

    def operator(self, size: tuple[int, int], *sources: Tensor) -> Tensor:
        W = sources[0]
        taps = W.shape[2] * W.shape[3]
        norms = W.unflatten(0, (self.groups, -1)).flatten(1).norm(dim=1) * taps**0.5
        return W / norms.repeat_interleave(len(W) // self.groups).view(-1, 1, 1, 1) ** self.power


def polar_matrix(layer: nn.Module, case: Case) -> Tensor:
    Q = grouped(layer.kernel.detach(), layer.groups, lambda W: polar(conv_matrix(W, case.inner_size, layer.dilation)))
    return Q @ downsample_matrix(case.i, case.size, case.stride)


def frobenius_matrix(layer: nn.Module, case: Case) -> Tensor:
    parts = [W / (W.norm() * (W.shape[2] * W.shape[3]) ** 0.5) for W in layer.weight.detach().chunk(layer.groups)]
    return kernel_matrix(layer, case, torch.cat(parts))


CONTRACTS = {
    "toy_polar": Contract(PolarConv2d, "orthogonal", polar_matrix),
    "toy_frobenius": Contract(FrobeniusConv2d, "nonexpansive", frobenius_matrix),
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """What a new method needs: one call. Other test files do not see it."""
    register_method("toy_polar", conv=PolarConv2d, linear="cayley")
    register_method("toy_frobenius", conv=FrobeniusConv2d, linear="bjorck")
    yield
    for name in CONTRACTS:
        layers.methods._METHODS.pop(name)


every_toy = pytest.mark.parametrize("name", CONTRACTS)
one_toy = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if k else []) for k, name in enumerate(CONTRACTS)]
)
CHECKS = [f for n, f in vars(suite).items() if n.startswith("test_") and "contract" in inspect.signature(f).parameters]


@every_toy
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_the_contract_suite(name: str, check) -> None:
    """Each test of the suite, on some of its cases."""
    wanted = inspect.signature(check).parameters
    cases = [CASES[k] for k in (0, 1, 2, 6, 14, 19, 23)] if "case" in wanted else [None]
    for case in suite.GRADIENT_CASES[:3] if "mode" in wanted else cases:
        options = {"contract": CONTRACTS[name], "case": case, "mode": "train", "fast": False}
        check(**{k: v for k, v in options.items() if k in wanted})


def network(name: str) -> nn.Sequential:
    return models.build("kwlarge", name, width=0.125, in_channels=1, image_size=8).eval()


@one_toy
def test_networks_certificates_and_verification(name: str) -> None:
    model, x = network(name), load("digits")[1].images[:8]
    bound = lipschitz_bound(model, x.shape[1:])
    assert 0 < bound < 1 + 1e-5
    found = certify(model, [(x, model(x).argmax(1))])
    assert found.lipschitz == pytest.approx(bound, rel=1e-12)
    assert found.slack is not None
    assert 0 < found.slack.max() < 1e-4
    assert (found.radius > 0).any()
    assert not cross_examine(model.requires_grad_(False), x, model(x).argmax(1), found.radius, iterations=10).any()
    checked = verify(model, x, claimed=1.0)
    assert checked.faults == []
    assert checked.layers[0].promise == CONTRACTS[name].guarantee


@every_toy
def test_export(name: str) -> None:
    model, x = network(name), torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(export(model, (1, 8, 8))(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.slow
@every_toy
def test_onnx(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, x = network(name), torch.rand(5, 1, 8, 8)
    to_onnx(model, x, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.tensor(logits), model(x), rtol=0, atol=1e-5)


@one_toy
def test_the_command_line(name: str, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    main(["train", "--out", str(run), "--model.conv", name, "--model.width", "0.125", "--recipe.epochs", "1",
          "--examples", "256"])  # fmt: skip
    main(["verify", str(run)])
    assert "verified, 7 layers" in capsys.readouterr().out
    assert type(models.load(run)[1]) is CONTRACTS[name].build
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert name in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONTRACTS)[:1])
def test_benchmarks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PANELS, "a", ("image size", [{"c": 4, "o": 4, "k": 3, "n": n} for n in (4, 8)]))
    options = ["--methods", f"[plain,{name}]", "--rounds", "1", "--batch", "2", "--out", str(tmp_path)]
    main(["bench", "layers", "--panels", "[a]", *options])
    cases = json.loads((tmp_path / "layers.json").read_text())["cases"]
    assert all(set(case["figures"]) == {"plain", name} for case in cases)


def test_options_of_a_method_are_in_its_signature() -> None:
    parameters = list(inspect.signature(FrobeniusConv2d).parameters)
    assert parameters[:4] == ["in_channels", "out_channels", "kernel_size", "stride"]
    assert parameters[-1] == "power"
    with pytest.raises(
        TypeError, match=r"FrobeniusConv2d has no option 'spower'; it takes in_channels, .*, dtype, power$"
    ):
        FrobeniusConv2d(2, 2, 3, spower=2)


def test_bad_registrations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be a new name; .*cayley.* are taken, got 'cayley'"):
        register_method("cayley", conv=PolarConv2d)
    with pytest.raises(ValueError, match="'nothing' needs conv=, linear= or both"):
        register_method("nothing")


def test_every_method_has_a_contract() -> None:
    """A method of the package that has no oracle in contract.py is not finished."""
    from contract import BLOCKS, LAYERS

    contracts = (*LAYERS.values(), *BLOCKS.values(), *CONTRACTS.values())
    built = {type(contract.layer(CASES[0])) for contract in contracts}
    for name in layers.conv_methods():
        assert type(layers.methods.conv_method(name)(3, 3, 3)) in built, name


def test_a_forward_of_its_own_needs_a_bound_of_its_own() -> None:
    """The negative control: a method that computes something else than its operator is not trusted."""

    class Louder(PolarConv2d):
        def convolve(self, x: Tensor, bias: Tensor | None, *, adjoint: bool) -> Tensor:
            return 2 * super().convolve(x, bias, adjoint=adjoint)

    class Honest(Louder):
        def lipschitz(self, shape: tuple[int, ...]) -> float:
            return 2 * super().lipschitz(shape)

    with pytest.raises(TypeError, match=r"no rule for .*Louder"):
        lipschitz_bound(Louder(2, 2, 3), (2, 6, 6))
    assert lipschitz_bound(Honest(2, 2, 3), (2, 6, 6)) == pytest.approx(2, rel=1e-5)
    assert issubclass(FrobeniusConv2d, KernelConv2d)
