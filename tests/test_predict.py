"""One image, whatever it is given as: its class, its name and its certified radius."""

import copy
import io
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import bomb, encoded, picture, run_folder
from torch import nn

import orthoconv
from orthoconv import Prediction, certify, in_double, lipschitz_bound, models, predict
from orthoconv.attacks import cross_examine
from orthoconv.data import DataError
from orthoconv.data.decoding import read_picture
from orthoconv.data.names import class_names
from orthoconv.data.pictures import as_images
from orthoconv.margins import radius_text
from orthoconv.models.describing import description_of
from orthoconv.nn import CayleyConv2d, CayleyLinear, MaxMin


def network(channels: int = 1, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = CayleyConv2d(channels, 4, 3), MaxMin(), nn.Flatten(), CayleyLinear(256, 3), nn.Flatten()
    return models.describe(nn.Sequential(*layers).to(dtype), (channels, 8, 8), ["a", "b", "c"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_radii_are_those_of_certify(dtype: torch.dtype) -> None:
    model, x = network(dtype=dtype).train(), torch.rand(300, 1, 8, 8, dtype=dtype)
    predictions = predict(model, x)
    assert model.training, "the mode of the model stays"
    assert len(predictions) == len(list(predictions)) == 300
    parts = x.split(256)  # as many as predict takes at a time: products of other sizes may round differently
    expected = certify(model, zip(parts, predictions.index.split(256), strict=True))
    assert torch.equal(predictions.radius, expected.radius)
    logits = torch.cat([model.eval()(part) for part in parts])
    assert torch.equal(predictions.logits, logits)
    assert torch.equal(predictions.index, logits.argmax(1))
    two = logits.topk(2).values
    torch.testing.assert_close(predictions.margin, two[:, 0] - two[:, 1])
    exact = in_double(model)(x.double()).topk(2).values
    bound = (exact[:, 0] - exact[:, 1]) / 2**0.5 / lipschitz_bound(model, (1, 8, 8))
    assert (predictions.radius.double() <= bound).all(), "of exact arithmetic"
    assert (predictions.radius.double() >= bound - 1e-5).all(), "and no more is deducted than rounding needs"
    paper = certify(model, [(x, predictions.index)], rounding=False)
    assert (predictions.radius <= paper.radius).all()
    assert (predictions.radius < paper.radius).any(), "the negative control: rounding counts"


def test_a_radius_is_printed_rounded_down() -> None:
    for radius in (0.00019999, 0.48689, 0.99999, 0.3, 0.1 + 0.2, 1 / 3, 12.34567, 1e-5, 1e300):
        text = radius_text(radius)
        assert 0 <= Fraction(radius) - Fraction(text) < Fraction(1, 10_000), text
    assert [radius_text(v) for v in (0.0, 0.25, math.inf)] == ["0.0000", "0.2500", "inf"]
    assert str(Prediction(2, None, 1.0, 0.48689)).endswith("certified radius 0.4868")


def test_no_attack_succeeds_within_the_radius_and_some_do_outside() -> None:
    model, x = network().eval(), torch.rand(20, 1, 8, 8)
    predictions = predict(model, x)
    assert not cross_examine(model, x, predictions.index, predictions.radius, iterations=20, restarts=1).any()
    further = 4 * predictions.radius
    assert cross_examine(model, x, predictions.index, further, share=1, iterations=20, restarts=1).any()


def test_a_tie_and_an_overflow_have_no_radius() -> None:
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    nn.init.zeros_(tied[1].weight), nn.init.zeros_(tied[1].bias)
    assert predict(tied, torch.rand(1, 8, 8))[0] == Prediction(0, None, 0.0, 0.0)
    tied[1].weight.data[0] = 6e36
    (one,) = predict(tied, torch.ones(1, 8, 8))
    assert one == Prediction(0, None, float("inf"), 0.0)


def test_a_prediction_reads_well() -> None:
    (one,) = predict(network(), torch.zeros(1, 8, 8))
    assert one.name == "abc"[one.index]
    start = f"{one.name} (class {one.index}), margin {one.margin:.4f}, certified radius "
    assert str(one) == f"{start}{radius_text(one.radius)}"
    assert str(Prediction(2, None, 1.0, 0.5)) == "class 2, margin 1.0000, certified radius 0.5000"
    both = predict(network(), torch.zeros(2, 1, 8, 8))
    assert str(both) == f"{one}\n{one}"
    assert both.names == [one.name] * 2
    assert repr(both) == f"Predictions(2 images, Lipschitz bound {both.lipschitz:.9g})\n{both}", "no tensors"


@pytest.mark.parametrize("channels", [1, 3])
def test_every_way_to_give_an_image_is_the_same(channels: int, tmp_path: Path) -> None:
    array = picture(8, 8) if channels == 1 else picture(8, 8, 3)
    image = Image.fromarray(array)
    image.save(path := tmp_path / "image.png")
    bytes_first = torch.from_numpy(array.reshape(8, 8, channels)).permute(2, 0, 1)
    x = bytes_first.float() / 255
    ways: list[Any] = [
        *(x, x[None], x.double(), bytes_first, bytes_first[None], array, array[None], array.reshape(8, 8, channels)),
        *(array / 255, (array / 255).astype(np.float32), array[::-1][::-1], image, path, str(path), encoded(image)),
        *([path], (array, image), [x, path, array], [x[None].repeat(2, 1, 1, 1), image]),
    ]
    for way in ways:
        predictions = predict(network(channels), way)
        assert torch.equal(predictions.images, x.expand(len(predictions), -1, -1, -1)), type(way)
    assert torch.equal(as_images(np.stack([array, 255 - array]))[1], (255 - bytes_first).float() / 255)


def test_pictures_become_grey_or_coloured_as_the_network_wants_them(tmp_path: Path) -> None:
    colour, grey = Image.fromarray(picture(8, 8, 3)), Image.fromarray(picture(8, 8))
    by_pillow = torch.from_numpy(np.array(colour.convert("L"))).float() / 255
    for way in (colour, encoded(colour), np.asarray(colour)):
        x = predict(network(1), way).images
        assert (x[0, 0] - by_pillow).abs().max() <= 0.502 / 255, "Pillow rounds to bytes"
    for way in (grey, encoded(grey), np.asarray(grey)):
        x = predict(network(3), way).images
        assert torch.equal(x, (torch.from_numpy(picture(8, 8)).float() / 255).expand(1, 3, -1, -1))
    clear = colour.copy()
    clear.putalpha(7)
    assert torch.equal(as_images([clear, np.asarray(clear), colour])[0], as_images(colour)[0])
    deep = Image.fromarray(picture(8, 8).astype(np.uint16) * 257)
    assert torch.equal(as_images(encoded(deep)), as_images(grey)), "16 bits"
    black_and_white = Image.fromarray(picture(8, 8) > 99)
    assert set(as_images(black_and_white).unique().tolist()) == {0.0, 1.0}


def test_a_photograph_is_turned_upright() -> None:
    image, exif = Image.fromarray(picture(6, 8, 3)), Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    assert torch.equal(as_images(buffer.getvalue()), as_images(image).rot90(-1, (2, 3)))


def test_scaling() -> None:
    """Until the image covers the size; then the longer side loses as much at each end."""
    array = picture(20, 13, 3)
    x = as_images(array, (3, 8, 8), resize=True)
    whole = Image.fromarray(array).resize((8, 12), Image.Resampling.BILINEAR)
    assert x.shape == (1, 3, 8, 8)
    assert (x - as_images(whole)[:, :, 2:10]).abs().max() < 2.01 / 255, "Pillow rounds to bytes, twice"
    assert torch.equal((255 * x).round() / 255, x), "bytes stay bytes"
    smooth = as_images(array / 256, (3, 8, 8), resize=True)
    assert not torch.equal((255 * smooth).round() / 255, smooth)
    across = as_images(array.transpose(1, 0, 2), (3, 8, 8), resize=True)
    assert torch.equal(across.mT, x)
    assert as_images(array, resize=(4, 5)).shape == (1, 3, 4, 5)
    same = as_images(picture(8, 8), (1, 8, 8), resize=True)
    assert torch.equal(same, as_images(picture(8, 8))), "an image that fits is left alone"
    assert torch.allclose(as_images(torch.full((1, 3, 30), 0.3), (1, 8, 8), resize=True), torch.tensor(0.3))
    assert len(predict(network(), [picture(9, 9), picture(80, 31, 3)], resize=True)) == 2


X = torch.rand(1, 8, 8)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.rand(1, 9, 8), ValueError, r"takes images of 8 x 8 pixels .* got 9 x 8; resize=True"),
        (torch.rand(3, 8, 8), ValueError, r"takes images of 1 channels, got a tensor \(3, 8, 8\)"),
        (torch.rand(8, 8), ValueError, r"a tensor must be \(c, h, w\) or \(b, c, h, w\), got shape \(8, 8\)"),
        (
            255 * torch.ones(1, 8, 8),
            ValueError,
            r"must be in \[0, 1\], got values from 255 to 255; give bytes as uint8",
        ),
        (torch.full((1, 8, 8), float("nan")), ValueError, r"in \[0, 1\], got values from nan"),
        (torch.ones(1, 8, 8, dtype=torch.int64), TypeError, r"got torch.int64"),
        (torch.ones(0, 1, 8, 8), ValueError, r"must have pixels"),
        (np.ones((8, 8), dtype=np.int32), TypeError, r"bytes from 0 to 255 or floats in \[0, 1\], got int32"),
        (np.array([["a"]]), TypeError, r"got <U1"),
        (np.ones((2, 8, 8, 2)), ValueError, r"1, 3 or 4 channels, got shape \(2, 8, 8, 2\)"),
        ([], ValueError, r"at least one image is needed"),
        (3, TypeError, r"got int"),
        ([X, None], TypeError, r"got NoneType"),
        ("nowhere.png", DataError, r"nowhere.png does not exist"),
        ("/", DataError, r"/ is a folder, not an image"),
        (b"GIF89a", DataError, r"the image cannot be read as an image \(PNG"),
        (encoded(Image.new("L", (8, 8)))[:40], DataError, r"cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", DataError, r"not in a format that is known"),
    ],
)
def test_refusals(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        predict(network(), given)


def test_further_refusals() -> None:
    with pytest.raises(ValueError, match=r"torch.from_numpy\(array\) if its channels come first"):
        predict(network(3), np.zeros((3, 8, 8)))
    with pytest.raises(ValueError, match=r"resize must be True, False, or a height and a width, got 8"):
        predict(network(), X, resize=8)
    with pytest.raises(ValueError, match=r"needs a network that knows its size"):
        as_images(X, resize=True)
    with pytest.raises(ValueError, match=r"images of one call must have one shape"):
        as_images([X, torch.rand(1, 9, 9)])
    with pytest.raises(ValueError, match=r"has 3 classes, but 2 names"):
        predict(network(), X, class_names=["a", "b"])
    with pytest.raises(ValueError, match=r"returns logits \(b, classes\), got \(1, 1, 8, 8\)"):
        predict(nn.ReLU(), X)
    for wrong in ({"input_shape": (8, 8)}, {"input_shape": (0, 8, 8)}, {"class_names": "abc"}, {"class_names": [1]}):
        with pytest.raises(ValueError, match=r"got .*(8, 8|0|abc|1)"):
            models.describe(nn.ReLU(), **wrong)


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    for side in (12_000, 60_000):
        with pytest.raises(DataError, match=r"pixels"):
            read_picture(bomb(side))
    with pytest.raises(DataError, match=r"2000 x 2000 pixels, more than 1000000"):
        read_picture(bomb(2000), most=1_000_000)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert len(predict(network(), picture(8, 8))) == 1
    with pytest.raises(DataError, match=r'needs Pillow: pip install "orthoconv\[lab\]"'):
        predict(network(), b"anything")


def test_the_network_that_comes_along() -> None:
    model = models.pretrained("kwlarge_cayley_cifar10")
    assert description_of(model) == ((3, 32, 32), class_names("cifar10"))
    (one,) = orthoconv.predict(model, picture(32, 32, 3))
    assert one.name == model.class_names[one.index]
    assert 0 < one.radius < one.margin / 2**0.5 + 1e-3
    assert description_of(copy.deepcopy(model)) == description_of(model)


def test_a_run_knows_its_classes(tmp_path: Path) -> None:
    named = run_folder(tmp_path / "named", data="folder", classes=["ant", "bee", "cow"])
    for path in (named, named / "model.safetensors"):
        assert description_of(models.load(path)) == ((1, 8, 8), ("ant", "bee", "cow"))
    assert predict(models.load(named), picture(8, 8))[0].name in ("ant", "bee", "cow")
    nameless = run_folder(tmp_path / "nameless", data="folder")
    assert description_of(models.load(nameless)) == ((1, 8, 8), None)
    assert predict(models.load(nameless), picture(8, 8)).names == [None]
    digits = run_folder(tmp_path / "digits", data="digits")
    assert description_of(models.load(digits)).class_names is None, "digits have ten classes, this run has three"
    for k, wrong in enumerate((["ant", "bee"], "abc", [1, 2, 3])):
        with pytest.raises(ValueError, match=r"config.json must have 3 names of classes, or none, got"):
            models.load(run_folder(tmp_path / str(k), data="folder", classes=wrong))
