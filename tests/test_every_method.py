"""Every registered method, trained on digits: singular values, certificates under attack, ONNX."""

import math

import pytest
import torch
from torch import nn

from orthoconv import certify, models, to_onnx, verify
from orthoconv.attacks import cross_examine
from orthoconv.data import load
from orthoconv.nn import conv_methods
from orthoconv.nn.reparametrized import Reparametrized
from orthoconv.train import Recipe, fit

pytestmark = pytest.mark.slow


@pytest.fixture(params=[name for name in conv_methods() if name != "plain"])
def trained(request: pytest.FixtureRequest, tmp_path) -> nn.Module:
    """A small network of that method after two epochs, with a head of rows of norm 1."""
    torch.manual_seed(0)
    model = models.build("kwlarge", request.param, width=0.25, in_channels=1, image_size=8, head="normalized")
    recipe = Recipe(epochs=2, batch_size=64, augment=False, loss="offset_cross_entropy")
    assert len(list(fit(model, load("digits")[0], recipe, tmp_path / "checkpoint"))) == 2
    return model.eval().requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_a_trained_network(trained: nn.Module, tmp_path) -> None:
    x, y = (t[:100] for t in load("digits")[1])
    for layer in trained.modules():
        if isinstance(layer, Reparametrized) and layer.promise == "orthogonal":
            inputs: list[torch.Tensor] = []
            handle = layer.register_forward_hook(lambda _, args, __, inputs=inputs: inputs.append(args[0]))
            trained(x[:1])
            handle.remove()
            values = layer.singular_values_for(inputs[0].shape[1:])
            assert (values - 1).abs().max() <= 2e-6 * math.sqrt(max(layer.cached_operator().shape[-2:])), layer
    assert not verify(trained, x[:8]).faults

    radius = certify(trained, [(x, y)]).radius
    assert (radius > 0).float().mean() > 0.3
    pytest.importorskip("pyautoattack")
    assert not cross_examine(trained, x[:50], y[:50], radius[:50], iterations=20, restarts=1).any()

    onnxruntime = pytest.importorskip("onnxruntime")
    to_onnx(trained, x, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), trained(x), rtol=0, atol=1e-5)
