"""The examples do what they say, in small."""

import re
from pathlib import Path

import pytest
import torch

from orthoconv import models, predict

ROOT = Path(__file__).parents[1] / "examples"


def test_all_are_listed() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (ROOT / "README.md").read_text())
    assert sorted(listed) == sorted(p.name for p in ROOT.glob("*.py"))


def test_one_line(load_script) -> None:
    certified = load_script("examples/one_line.py").main(epochs=2)
    assert certified["plain"] < 0.05
    assert certified["orthogonal"] > 0.5


def test_convert_resnet(load_script) -> None:
    assert load_script("examples/convert_resnet.py").main() <= 1 + 1e-5


def test_isometry(load_script, tmp_path) -> None:
    found = load_script("examples/isometry.py").main(depth=100, path=tmp_path / "isometry.png")
    orthogonal = found.pop("orthogonal, MaxMin")
    assert max(orthogonal) - min(orthogonal) < 1e-3
    assert all(max(norms) / min(norms) > 10 for norms in found.values())
    assert (tmp_path / "isometry.png").stat().st_size > 10_000


def test_invertible(load_script) -> None:
    first, last, error = load_script("examples/invertible.py").main(steps=40)
    assert last < first - 0.5
    assert error < 1e-4


@pytest.mark.slow
def test_serve_onnx(load_script) -> None:
    pytest.importorskip("onnxruntime")
    images, radii = load_script("examples/serve_onnx.py").main(n=60)
    model = models.pretrained("kwlarge_cayley_cifar10")
    predictions = predict(model, torch.from_numpy(images))
    assert radii == pytest.approx(predictions.radius.numpy(), abs=1e-5)
    assert (radii >= predictions.radius.numpy() - 1e-7).all(), "float64 has less to deduct"
    assert (radii > 36 / 255).mean() > 0.4
