"""Exported models are plain, and the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orthoconv import export, in_double, models, to_onnx
from orthoconv.lab.cli import main
from orthoconv.nn import (
    BCOPConv2d,
    BjorckLinear,
    CayleyConv2d,
    CayleyConvTranspose2d,
    CayleyLinear,
    CircularConv2d,
    GroupSort,
    InvertibleDownsample,
    Layer,
    MaxMin,
    OSSNConv2d,
    RKOConv2d,
    SVCMConv2d,
    conv_methods,
)  # fmt: skip

LAYERS = [
    CayleyConv2d, CayleyConvTranspose2d, BCOPConv2d, RKOConv2d, OSSNConv2d, SVCMConv2d, CircularConv2d,
]  # fmt: skip
OPTIONS = [{}, {"stride": 2}, {"groups": 2}, {"dilation": 2, "bias": False}, {"padding_mode": "zeros"}]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_every_layer(kind: type, options: dict[str, int], k: int) -> None:
    layer = kind(4, 6, k, **options, dtype=torch.float64).eval()
    for size in [(6, 10)] + ([(8, 8)] if "stride" in options else [(5, 7), (1, 1)]):
        x = torch.randn(2, 4, *size, dtype=torch.float64)
        plain = export(layer, x.shape[1:])
        torch.testing.assert_close(plain(x), layer(x), rtol=1e-12, atol=1e-12)
        assert not any(t.is_complex() for t in plain.state_dict().values())
        assert not any(isinstance(module, Layer) for module in plain.modules())


@pytest.mark.parametrize(
    ("name", "conv"),
    [
        pytest.param(name, conv, marks=[] if name == "kwlarge" or conv == "cayley" else [pytest.mark.slow])
        for name in ("kwlarge", "resnet9", "wide_resnet10_10")
        for conv in conv_methods()
    ],
)
def test_every_network(name: str, conv: str) -> None:
    n = 8 if name == "kwlarge" else 16
    model = models.build(name, conv, width=0.125, mean=[0.5] * 3, std=[0.2] * 3, lipschitz=0.9, image_size=n)
    plain, x = export(model, (3, n, n)), torch.rand(3, 3, n, n)
    y = model.eval()(x)  # inputs are divided by 0.2, and logits are as large as 5
    torch.testing.assert_close(plain(x), y, rtol=0, atol=1e-5 * max(1.0, float(y.detach().abs().max())))
    assert all(not p.requires_grad for p in plain.parameters())


def test_the_model_itself_is_left_alone() -> None:
    model = nn.Sequential(CayleyConv2d(3, 4, 3), MaxMin(), nn.Flatten(), CayleyLinear(4 * 36, 5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain = export(model, (3, 6, 6))
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert isinstance(model[0], CayleyConv2d)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    x = torch.rand(2, 3, 6, 6)
    assert (plain(x) - model.eval()(x)).abs().max() > 1e-2, "an export does not follow its model"
    model.load_state_dict(before)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-5)


class TwoSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = CayleyConv2d(2, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x)[..., ::2, ::2])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="layers that see images of one size"):
        export(TwoSizes(), (2, 8, 8))
    with pytest.raises(ValueError, match="input_shape must be the shape of one input"):
        export(TwoSizes(), 8)
    unused = TwoSizes()
    unused.forward = lambda x: x
    with pytest.raises(ValueError, match=r"conv .* is not"):
        export(unused, (2, 8, 8))
    plain = export(nn.Sequential(CayleyConv2d(2, 2, 3)), (2, 8, 8))
    with pytest.raises(ValueError, match=r"exported for images of \(8, 8\) here, got \(4, 4\)"):
        plain(torch.zeros(1, 2, 4, 4))


def test_a_layer_in_two_places() -> None:
    layer = CayleyConv2d(4, 4, 3)
    model = nn.Sequential(
        layer, MaxMin(), layer, GroupSort(4), InvertibleDownsample(2), nn.Flatten(), BjorckLinear(64, 6)
    )
    plain, x = export(model, (4, 4, 4)), torch.rand(2, 4, 4, 4)
    torch.testing.assert_close(plain(x), model.eval()(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_torch_export_and_compile() -> None:
    model = models.build("kwlarge", width=0.125, image_size=8).eval()
    plain, x = export(model, (3, 8, 8)), torch.rand(4, 3, 8, 8)
    program = torch.export.export(plain, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for n in (2, 5):
        x = torch.rand(n, 3, 8, 8)
        torch.testing.assert_close(program(x), model(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("conv", ["cayley", "bcop"])
@pytest.mark.parametrize("name", ["kwlarge", "resnet9"])
def test_onnx(name: str, conv: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = models.build(name, conv, width=0.125, mean=[0.5] * 3).eval()
    to_onnx(model, torch.rand(4, 3, 32, 32), tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for n in (1, 4, 7):
        x = torch.rand(n, 3, 32, 32)
        (logits,) = session.run(None, {"images": x.numpy()})
        torch.testing.assert_close(torch.tensor(logits), model(x), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_command(tmp_path: Path, capsys) -> None:
    runtime = pytest.importorskip("onnxruntime")
    run = tmp_path / "run"
    main(["train", "--out", str(run), "--recipe.epochs", "1", "--model.width", "0.25", "--recipe.augment", "false"])
    main(["export", str(run)])
    main(["export", str(run), "--format", "pt2"])
    assert "largest difference to the model" in capsys.readouterr().out
    session = runtime.InferenceSession(run / "model.onnx", providers=["CPUExecutionProvider"])
    x = torch.rand(3, 1, 8, 8)
    ours = torch.export.load(run / "model.pt2").module()(x)
    torch.testing.assert_close(torch.tensor(session.run(None, {"images": x.numpy()})[0]), ours, rtol=0, atol=1e-5)
    assert json.loads((run / "config.json").read_text())["data"] == "digits"


class Loud(CayleyLinear):
    def apply_matrix(self, x: Tensor) -> Tensor:
        return 5 * super().apply_matrix(x)


def with_hook() -> nn.Module:
    layer = CayleyLinear(3, 3)
    layer.register_forward_hook(lambda module, inputs, output: 5 * output)
    return layer


def with_own_forward() -> nn.Module:
    layer = CayleyLinear(3, 3)
    layer.forward = lambda x: 5 * x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize("make", [with_hook, with_own_forward, lambda: Loud(3, 3)])
def test_nothing_is_left_out_in_silence(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Flatten(), make())
    for copied in (lambda: export(model, (3,)), lambda: in_double(model)):
        with pytest.raises(TypeError, match=r"hooks of 1|own forward of 1|leaves out what .*Loud does, at 1"):
            copied()


def test_a_model_that_calls_more_than_forward_is_refused() -> None:
    class Back(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = CayleyConv2d(2, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer.inverse(self.layer(x))

    with pytest.raises(TypeError, match=r"forward pass of each layer, and nothing else of it: .*inverse"):
        export(Back(), (2, 4, 4))
