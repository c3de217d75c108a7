"""ONNX files that carry their certificate: float64 logits of the same operators, and metadata."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from orthoconv import certify, in_double, models, predict, rounding_bound, to_onnx
from orthoconv.certificates import growth
from orthoconv.linalg import row_norms
from orthoconv.nn import (
    BROConv2d,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
    IsometryAverage,
    MaxMin,
    Mirror,
    Move,
    Scale,
    SoftHuber,
    TaylorSOCConv2d,
)
from orthoconv.onnx_files import certificate_metadata
from orthoconv.twins import Twins, export_in_double


@pytest.fixture(scope="module")
def reader(load_script) -> ModuleType:
    """The example, which computes certificates without this library."""
    return load_script("examples/serve_onnx.py")


def network(conv: str = "cayley") -> nn.Sequential:
    torch.manual_seed(0)
    words = ["conv 6 k3", "maxmin", "conv 8 k3 s2", "maxmin", "pool 2", "flatten", "linear 12", "maxmin", "head"]
    options = {"in_channels": 2, "image_size": 8, "classes": 4, "mean": [0.4, 0.6], "std": [0.5, 0.25]}
    return models.build(words, conv, **options).eval()


@pytest.mark.parametrize("conv", ["cayley", "bcop", "bro", "soc", "soc_taylor", "shift", "aoc", "sll", "lot", "aol"])
def test_the_twin_is_the_function_that_is_certified(conv: str) -> None:
    model, x = network(conv), torch.rand(3, 2, 8, 8)
    logits, doubled = Twins(model, (2, 8, 8))(x)
    exact = in_double(model)(x.double())
    bound = rounding_bound(model, (2, 8, 8), row_norms(x).max().item(), torch.float64)
    assert doubled.dtype == torch.float64
    assert torch.dist(doubled, exact) < 1e-13
    assert row_norms(doubled - exact).max() <= 2 * bound < 1e-7
    assert 1e-9 < torch.dist(logits, exact) < 1e-4, "the negative control: float32"


def test_what_is_not_the_same_function() -> None:
    """The negative controls: other operators than those of float32, and tables of float32."""
    from orthoconv import export

    model, x = network(), torch.rand(3, 2, 8, 8).double()
    exact = in_double(model)(x)
    assert torch.dist(export_in_double(model, (2, 8, 8))(x), exact) < 1e-13
    assert torch.dist(network().double()(x), exact) > 1e-9, "operators computed again"
    assert torch.dist(export(model, (2, 8, 8)).double()(x), exact) > 1e-9, "cosines of float32"
    plain = nn.Sequential(weight_norm(nn.Linear(9, 5)), nn.ReLU(), nn.Linear(5, 3))
    y = torch.rand(4, 9).double()
    assert torch.dist(export_in_double(plain, (9,))(y), in_double(plain)(y)) < 1e-14
    assert hasattr(plain[0], "parametrizations"), "the model itself is left alone"
    for layer in (BROConv2d(4, 4, 1), TaylorSOCConv2d(4, 4, 1), CayleyConvTranspose2d(4, 2, 3, 2)):
        z = torch.rand(2, 4, 4, 4).double()
        assert torch.dist(export_in_double(layer, (4, 4, 4))(z), in_double(layer)(z)) < 1e-13


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 6, (3, 2), stride=2, padding="valid", bias=False),
        nn.Conv2d(4, 6, (2, 4), padding="same", dilation=2),
        nn.Conv2d(4, 6, 3, groups=2, padding=(0, 1), stride=(2, 1)),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.AvgPool2d(2),
        nn.AvgPool2d((3, 2), 2),
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
    ],
    ids=str,
)
def test_products_in_place_of_convolutions(layer: nn.Module) -> None:
    x = torch.rand(2, 4, 9, 7)
    with torch.no_grad():
        expected = layer.double()(x.double())
        twins = Twins(nn.Sequential(layer.float()), (4, 9, 7))
        torch.testing.assert_close(twins(x)[1], expected, rtol=0, atol=1e-13)


def test_metadata_give_the_radii_of_certify(reader: ModuleType) -> None:
    """For the head that is orthogonal, one whose rows are not, and none at all."""
    heads = [nn.Linear(12, 4), CayleyLinear(12, 4), nn.Sequential(CayleyLinear(12, 4), nn.Tanh())]
    for head in heads:
        model = nn.Sequential(*network()[:-1], head).eval()
        x = torch.rand(20, 2, 8, 8)
        facts = certificate_metadata(model, (2, 8, 8))
        logits = Twins(model, (2, 8, 8))(x)[1].detach().numpy()
        classes, radii = reader.certified_radii(logits, x.numpy(), facts)
        certificates = certify(model, [(x, torch.tensor(classes))])
        assert radii == pytest.approx(certificates.radius.double().numpy(), abs=3e-6)
        assert (radii > certificates.radius.numpy() - 1e-7).mean() > 0.9, "float64 has less to deduct"
        head_room = growth(model, (2, 8, 8), torch.float64)
        assert facts["slack"] == {"relative": head_room.relative, "absolute": head_room.absolute}
        assert facts["lipschitz_bound"] == head_room.lipschitz
        without = {**facts, "rates": None}
        assert (reader.certified_radii(logits, x.numpy(), without)[1] <= radii * (1 + 1e-9)).all()


def test_the_readers_formula(reader: ModuleType) -> None:
    """By hand: two classes, a lead of 1, a rate of 2; and what is not known."""
    facts = {"slack": {"relative": 0.1, "absolute": 0.05}, "lipschitz_bound": 9.0, "rates": [[0, 2.0], [2.0, 0]]}
    image = np.full((1, 1, 1, 1), 0.5, dtype=np.float32)
    _, (radius,) = reader.certified_radii(np.array([[2.0, 1.0]]), image, facts)
    assert radius == pytest.approx((1 - 2**0.5 * 0.1001) / 2)
    assert radius < (1 - 2**0.5 * 0.1) / 2
    for bad in ([1.0, 1.0], [1.0, float("nan")], [float("inf"), 0.0], [1.0, 0.9]):
        assert reader.certified_radii(np.array([bad]), image, facts)[1] == 0
    same = {**facts, "rates": [[0.0, 0.0], [0.0, 0.0]]}
    assert reader.certified_radii(np.array([[2.0, 1.0]]), image, same)[1] == np.inf, "two rows that are the same"


def test_rates_are_left_out_for_many_classes() -> None:
    facts = certificate_metadata(nn.Sequential(nn.Flatten(), nn.Linear(8, 101)), (2, 2, 2))
    assert facts["rates"] is None


def opened(path: Path) -> tuple[Any, dict[str, Any]]:
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return session, {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}


@pytest.mark.slow
@pytest.mark.parametrize("conv", ["cayley", "bcop"])
def test_a_file(conv: str, reader: ModuleType, tmp_path: Path) -> None:
    model = models.describe(network(conv), (2, 8, 8), ["a", "b", "c", "d"])
    assert to_onnx(model, torch.rand(3, 2, 8, 8), tmp_path / "model.onnx", certificate=True)
    session, facts = opened(tmp_path / "model.onnx")
    assert facts["classes"] == ["a", "b", "c", "d"]
    assert facts["input_shape"] == [2, 8, 8]
    assert facts["normalization"]["std"] == [0.5, 0.25]
    for n in (1, 5):
        x = torch.rand(n, 2, 8, 8)
        logits, doubled = session.run(["logits", "logits64"], {"images": x.numpy()})
        assert np.abs(doubled - in_double(model)(x.double()).numpy()).max() < 1e-13
        torch.testing.assert_close(torch.tensor(logits), model(x).detach(), rtol=0, atol=1e-5)
        classes, radii = reader.certified_radii(doubled, x.numpy(), facts)
        predictions = predict(model, x)
        assert predictions.index.tolist() == classes.tolist()
        assert radii == pytest.approx(predictions.radius.numpy(), abs=1e-5)
    graph = pytest.importorskip("onnx").load(tmp_path / "model.onnx").graph
    doubles = [one.name for one in graph.initializer if one.data_type == 11 and one.dims]
    assert all("cos" in name or "sin" in name for name in doubles), "operators are stored once, in float32"
    assert str(Path(models.__file__).parent) not in (tmp_path / "model.onnx").read_bytes().decode("latin1")


class Unknown(nn.Module):
    """A module without a rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.slow
def test_files_without_a_certificate(tmp_path: Path) -> None:
    """A model that nobody can bound; and one with an operation that the runtime lacks in float64."""
    x = torch.rand(3, 2, 4, 4)
    for layer, message in (
        (Unknown(), "(?s)no rule for call_method sin.*"),
        (nn.LeakyReLU(), "cannot compute the model in float64"),
    ):
        model = nn.Sequential(CayleyConv2d(2, 4, 3), layer, MaxMin(), nn.Flatten(), CayleyLinear(64, 3))
        with pytest.raises(ValueError, match=rf"{message}.*certificate=False writes the logits alone"):
            to_onnx(model, x, tmp_path / "model.onnx", certificate=True)
        assert not (tmp_path / "model.onnx").exists()
        assert not to_onnx(model, x, tmp_path / "model.onnx", certificate=None)
        session, facts = opened(tmp_path / "model.onnx")
        assert [o.name for o in session.get_outputs()] == ["logits"]
        assert "rates" not in facts
        assert facts["input_shape"] == [2, 4, 4]
        (tmp_path / "model.onnx").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        TaylorSOCConv2d(2, 2, 3, terms=2, padding_mode="zeros"),
        TaylorSOCConv2d(2, 2, 3, padding_mode="zeros"),
        Scale(0.3),
        SoftHuber(0.3),
        IsometryAverage(nn.Identity(), [Mirror(), Move(0, 1)]),
        nn.AvgPool2d(3, 1, divisor_override=7),
    ],
    ids=str,
)
def test_numbers_that_float32_does_not_hold(layer: nn.Module, tmp_path: Path) -> None:
    """torch's exporter writes numbers of Python in float32; the file compares its float64 logits before it is kept."""
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3))
    x = torch.rand(3, 2, 4, 4)
    model(x)
    assert to_onnx(model.eval(), x, tmp_path / "model.onnx", certificate=True)


@pytest.mark.slow
def test_no_certificate_without_a_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orthoconv import onnx_files

    monkeypatch.setattr(onnx_files, "_computed", lambda *args: None)
    with pytest.raises(ValueError, match="onnxruntime, which is missing"):
        to_onnx(network(), torch.rand(3, 2, 8, 8), tmp_path / "model.onnx", certificate=True)
    assert not to_onnx(network(), torch.rand(3, 2, 8, 8), tmp_path / "model.onnx", certificate=None)


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from orthoconv import exporting, onnx_files

    class Wrong(Twins):
        """The negative control: tables of cosines in float32."""

        def __init__(self, model: nn.Module, shape: Any) -> None:
            super().__init__(model, shape)
            self.double_ = exporting.export(model, shape).double()

    monkeypatch.setattr(onnx_files, "Twins", Wrong)
    with pytest.raises(ValueError, match=r"differ by .* from those of the model, where rounding explains"):
        to_onnx(network(), torch.rand(3, 2, 8, 8), tmp_path / "model.onnx", certificate=True)


@pytest.mark.parametrize("given", [(2, 8, 8), torch.rand(1, 2, 8, 8), torch.rand(())])
def test_inputs_that_are_refused(given: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at least two inputs \(b, ...\), such as torch.rand\(2, \*shape\), got"):
        to_onnx(network(), given, tmp_path / "model.onnx")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
