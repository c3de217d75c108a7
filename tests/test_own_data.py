"""Images of one's own in folders: their classes, files of labels, sizes, splits and order."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from orthoconv.data import DataError, Split, load
from orthoconv.data.arrangement import balanced_order, divided
from orthoconv.data.pictures import as_images
from orthoconv.data.resizing import resized
from orthoconv.lab.cli import main

image = pytest.importorskip("PIL.Image")
GREYS = {"cat": 10, "dog": 110, "owl": 210}  # one shade for each class


def write(path: Path, grey: int, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, size, grey if mode == "L" else (grey, grey, grey)).save(path)


@pytest.fixture
def classes(tmp_path) -> Path:
    """Ten images of each class, in folders of classes."""
    for name, grey in GREYS.items():
        for k in range(10):
            write(tmp_path / name / f"{k}.png", grey + k)
    return tmp_path


def shades(split: Split) -> list[int]:
    return (split.images[:, 0, 0, 0] * 255).round().int().tolist()


def require_right(*splits: Split) -> None:
    """Each image has the label of its shade."""
    for split in splits:
        assert [grey // 100 for grey in shades(split)] == split.labels.tolist()
        assert split.classes == ("cat", "dog", "owl")


# Folders


def test_folders_of_classes_are_divided_by_a_seed(classes) -> None:
    train, test = load("folder", classes)
    require_right(train, test)
    assert train.labels.bincount().tolist() == [8, 8, 8]
    assert test.labels.bincount().tolist() == [2, 2, 2]
    assert not set(shades(train)) & set(shades(test))
    again, other = (load("folder", classes, seed=seed) for seed in (0, 1))
    assert shades(again[1]) == shades(test)
    assert set(shades(other[1])) != set(shades(test))
    assert load("folder", classes, split=0.5)[1].labels.bincount().tolist() == [5, 5, 5]


def test_a_share_of_one_makes_all_images_test_images(classes) -> None:
    train, test = load("folder", classes, split=1)
    assert (len(train.labels), len(test.labels)) == (0, 30)
    for bad in (0, -0.1, 1.5, "half"):
        with pytest.raises(DataError, match="split must be a share of the images, above 0 and at most 1"):
            load("folder", classes, split=bad)


@pytest.mark.parametrize("other", ["test", "val"])
def test_folders_train_and_test(tmp_path, other: str) -> None:
    for name, grey in GREYS.items():
        write(tmp_path / "train" / name / "a.png", grey)
        write(tmp_path / other / name / "b.png", grey + 1)
    train, test = load("folder", tmp_path)
    require_right(train, test)
    assert sorted(shades(train) + shades(test)) == [10, 11, 110, 111, 210, 211]
    with pytest.raises(DataError, match="has training and test images apart, so that split must be left out"):
        load("folder", tmp_path, split=0.5)
    write(tmp_path / other / "eel" / "b.png", 0)
    with pytest.raises(DataError, match="has the class 'eel', which the training images do not have"):
        load("folder", tmp_path)


def test_a_class_may_be_called_train(tmp_path) -> None:
    for name in ("plane", "train"):
        for k in range(3):
            write(tmp_path / name / f"{k}.png", k)
    assert load("folder", tmp_path)[0].classes == ("plane", "train")


CSV = {
    "plain": "a.png,cat\nb.png,dog\nc.png,owl\nd.png,cat\n",
    "header": "file,label\na.png,cat\nb.png,dog\nc.png,owl\nd.png,cat\n",
    "columns": "\ufeffage,Class,Filename\n3,cat,a.png\n4,dog,b.png\n5,owl,c.png\n6,cat,d.png\n",
    "without endings": "id,category\na,cat\nb,dog\nc,owl\nd,cat\n",
}
LABELS = {"a.png": "cat", "b.png": "dog", "c.png": "owl", "d.png": "cat"}
JSON = {
    "object": LABELS,
    "pairs": list(LABELS.items()),
    "rows": [{"file": name, "label": label} for name, label in LABELS.items()],
}


@pytest.fixture
def flat(tmp_path) -> Path:
    folder = tmp_path / "flat"
    for name, label in LABELS.items():
        write(folder / name, GREYS[label])
    return folder


@pytest.mark.parametrize("kind", [*CSV, *JSON])
def test_files_of_labels(flat, kind: str) -> None:
    if kind in CSV:
        (flat / "labels.csv").write_text(CSV[kind])
    else:
        (flat / "labels.json").write_text(json.dumps(JSON[kind]))
    train, test = load("folder", flat)
    require_right(train, test)
    assert sorted(shades(train) + shades(test)) == [10, 10, 110, 210]
    assert shades(test) == [10], "the only class with two images"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "labels.csv",
            "a.png,cat\n../outside.png,dog\n",
            r"labels\.csv cannot be used: '../outside.png' is outside of",
        ),
        ("labels.csv", "a.png,cat\n/etc/hostname,dog\n", "'/etc/hostname' is outside of the folder"),
        ("labels.csv", "a.png,cat\nlink.png,dog\n", "'link.png' is outside of the folder"),
        ("labels.csv", "a.png,cat\nz.png,dog\n", "there is no image 'z.png' in the folder"),
        ("labels.csv", "a.png,cat\nb.png\n", "the line 'b.png' lacks a file or a label"),
        ("labels.csv", "a,b,c\n1,2,3\n", "it has the columns a, b, c; two of them must be called file and label"),
        ("labels.csv", "", "it names no images"),
        ("labels.json", "3", "it has int where an object or a list should be"),
        ("labels.json", '[["a.png"]]', r"is not a file and its label"),
        ("labels.json", "{", r"labels\.json cannot be used"),
        ("labels.json", "[" * 100_000, r"labels\.json cannot be used"),
    ],
)
def test_files_of_labels_that_are_refused(flat, name: str, text: str, message: str) -> None:
    write(flat.parent / "outside.png", 0)
    (flat / "link.png").symlink_to(flat.parent / "outside.png")
    (flat / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load("folder", flat)


def test_images_without_labels_are_refused(flat, tmp_path) -> None:
    with pytest.raises(
        DataError, match=r"in folders of classes; for those without, it needs labels.csv or labels.json"
    ):
        load("folder", flat)
    (flat / "empty").mkdir()
    with pytest.raises(DataError, match=r"no images \(.png, .jpg, .*\) in folders of classes$"):
        load("folder", flat / "empty")
    with pytest.raises(DataError, match=r"a folder of images needs --data_dir, got .*nowhere"):
        load("folder", tmp_path / "nowhere")


def test_one_image_of_each_class_cannot_be_divided(tmp_path) -> None:
    for name, grey in GREYS.items():
        write(tmp_path / name / "a.png", grey)
    with pytest.raises(DataError, match="3 images are too few to take test images from: no class has two"):
        load("folder", tmp_path)


def test_images_of_differing_sizes_need_resize(classes) -> None:
    write(classes / "owl" / "large.png", 210, (40, 20))
    with pytest.raises(DataError, match=r"large.png differs in size .*: 40 x 20 pixels and 8 x 8; --resize 32, for"):
        load("folder", classes)
    train, test = load("folder", classes, resize=12)
    require_right(train, test)
    assert train.images.shape[1:] == test.images.shape[1:] == (1, 12, 12)
    assert load("folder", classes, resize=(8, 16))[0].images.shape[1:] == (1, 8, 16)
    for bad in (0, -1, (8,), (8, 0), 100_000, "big"):
        with pytest.raises(DataError, match="resize must be a number of pixels up to 4096, or a height and a width"):
            load("folder", classes, resize=bad)


def test_grey_and_coloured_images_may_stand_together(classes) -> None:
    write(classes / "owl" / "colour.png", 219, mode="RGB")
    train, test = load("folder", classes)
    assert train.images.shape[1] == 3
    require_right(train, test)
    assert torch.equal(train.images[:, 0], train.images[:, 2])


def test_photographs_are_turned_upright(tmp_path) -> None:
    """A camera stores how it was held in the tag 274; 6 is a quarter turn clockwise."""
    pixels = np.zeros((4, 6), dtype=np.uint8)
    pixels[:, :3] = 255
    exif = image.Exif()
    exif[274] = 6
    for k in range(2):
        (tmp_path / "a").mkdir(exist_ok=True)
        image.fromarray(pixels).save(tmp_path / "a" / f"{k}.png", exif=exif)
    upright = load("folder", tmp_path)[0].images[0, 0]
    assert upright.shape == (6, 4)
    assert torch.equal(upright, torch.tensor(np.rot90(pixels, -1) / 255, dtype=torch.float32))


@pytest.mark.parametrize(
    ("mode", "ending"),
    [("L", "png"), ("1", "png"), ("P", "gif"), ("RGBA", "png"), ("I;16", "png"), ("RGB", "ppm"), ("CMYK", "jpg")],
)
def test_a_folder_and_a_prediction_see_the_same_pixels(tmp_path, mode: str, ending: str) -> None:
    """A file is decoded in one place, whatever asks for it."""
    pixels = torch.arange(48, dtype=torch.uint8).view(6, 8).mul(5).numpy()
    picture = (
        image.fromarray(pixels.astype(np.uint16) * 257) if mode == "I;16" else image.fromarray(pixels).convert(mode)
    )
    (tmp_path / "a").mkdir()
    for k in range(2):
        picture.save(tmp_path / "a" / f"{k}.{ending}")
    seen = load("folder", tmp_path, split=0.5)[0].images
    assert seen.shape[2:] == (6, 8)
    assert torch.equal(seen, as_images(tmp_path / "a" / f"0.{ending}"))
    if mode not in ("1", "CMYK"):  # those cannot keep all shades
        assert torch.equal((255 * seen[0, 0]).round(), torch.from_numpy(pixels).float())


def test_files_of_other_formats_are_not_opened(classes) -> None:
    """An image that another program would draw, under the name of one that is decoded."""
    (classes / "owl" / "x.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\nshowpage\n")
    with pytest.raises(DataError, match=r"x.png cannot be read as an image"):
        load("folder", classes)


# Sizes, division, order


def test_resizing_covers_and_cuts_evenly() -> None:
    ramp = torch.arange(40.0).expand(1, 1, 20, 40) / 40
    small = resized(ramp, (10, 10))
    assert small.shape == (1, 1, 10, 10)
    torch.testing.assert_close(small[0, 0], ((10.5 + 2 * torch.arange(10.0)) / 40).expand(10, 10), rtol=0, atol=1e-6)
    assert resized(ramp, (20, 40)) is ramp
    whole = torch.full((2, 3, 5, 7), 200, dtype=torch.uint8)
    assert torch.equal(resized(whole, (9, 4)), torch.full((2, 3, 9, 4), 200, dtype=torch.uint8))


def scaled_as_a_whole(images: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """All of the image is scaled, and then cut."""
    h, w = images.shape[2:]
    factor = max(size[0] / h, size[1] / w)
    large = [max(side, round(n * factor)) for side, n in zip(size, (h, w), strict=True)]
    top, left = ((n - side) // 2 for n, side in zip(large, size, strict=True))
    whole = torch.nn.functional.interpolate(images, large, mode="bilinear", antialias=True)
    return whole[:, :, top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize("shape", [(20, 40), (41, 20), (7, 100), (333, 2), (64, 65), (500, 300)])
@pytest.mark.parametrize("size", [(10, 10), (32, 24), (5, 90), (200, 64)])
def test_cutting_first_changes_nothing(shape: tuple[int, int], size: tuple[int, int]) -> None:
    x = torch.rand(2, 3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resized(x, size), scaled_as_a_whole(x, size), rtol=0, atol=1e-12)
    single = resized(x.float(), size)
    torch.testing.assert_close(single, scaled_as_a_whole(x, size).float(), rtol=0, atol=1e-4)
    as_bytes = resized((255 * x).round().to(torch.uint8), size).double()
    assert (as_bytes - scaled_as_a_whole((255 * x).round(), size)).abs().max() <= 0.501


def test_a_long_image_takes_no_more_memory_than_it_has() -> None:
    """As a whole it would have 640 million rows of 32 pixels."""
    for shape in ((20_000_000, 1), (1, 20_000_000)):
        line = torch.zeros(1, 1, *shape, dtype=torch.uint8)
        line.view(-1)[9_999_998:10_000_002] = 200
        assert torch.equal(resized(line, (32, 32)), torch.full((1, 1, 32, 32), 200, dtype=torch.uint8))


def test_built_in_sets_are_resized_too() -> None:
    train, test = load("digits", resize=4)
    assert (train.images.shape[2:], test.images.shape[2:]) == ((4, 4), (4, 4))
    assert train.classes == load("digits")[0].classes
    with pytest.raises(DataError, match=r"digits has test images of its own; split is for folder, npz, idx, got 0\.5"):
        load("digits", split=0.5)


def test_each_class_is_divided_by_the_same_share() -> None:
    labels = torch.tensor([0] * 50 + [1] * 7 + [2] * 2 + [3])
    split = Split(torch.arange(60.0).view(60, 1, 1, 1), labels)
    train, test = divided(split, 0.2, 0)
    assert test.labels.bincount(minlength=4).tolist() == [10, 1, 1, 0]
    both = torch.cat((train.images, test.images)).flatten()
    assert both.sort().values.tolist() == list(range(60)), "each image once"
    assert torch.equal(labels[train.images.flatten().long()], train.labels)


def test_any_first_images_are_balanced() -> None:
    """Within one image of each class, for each length; the order as it was is the negative control."""
    labels = torch.tensor([0] * 100 + [1] * 40 + [2] * 60)

    def worst(ordered: torch.Tensor) -> float:
        shares = (
            torch.nn.functional.one_hot(ordered).cumsum(0) - torch.arange(1, 201)[:, None] * labels.bincount() / 200
        )
        return float(shares.abs().max())

    orders = [balanced_order(labels, seed) for seed in range(5)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(200))
        assert worst(labels[order]) < 3
    assert worst(labels) > 40
    assert len({tuple(order.tolist()) for order in orders}) == 5
    assert torch.equal(balanced_order(labels, 3), orders[3])


def test_the_first_images_of_a_folder_are_of_all_classes(classes) -> None:
    for split in load("folder", classes):
        assert split.first(3).labels.sort().values.tolist() == [0, 1, 2]
    assert len({tuple(shades(load("folder", classes, seed=seed)[0].first(6))) for seed in range(4)}) == 4


def test_the_page_about_own_images(tmp_path, monkeypatch, capsys) -> None:
    """Its Python code, shortened; and each option that it names is one of the command line."""
    for name, grey in GREYS.items():
        for k in range(10):
            write(tmp_path / "pictures" / name / f"{k}.png", grey + k)
    page = (Path(__file__).parents[1] / "docs" / "own_data.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)
    short = code.replace("epochs=30, batch_size=64", "epochs=1, batch_size=8").replace("width=0.5", "width=0.125")
    assert short.count("=8") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(short, "own_data.md", "exec"), {})
    assert re.match(r"1 0\.\d+\n", capsys.readouterr().out)
    helps = []
    for command in ("train", "evaluate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps.append(capsys.readouterr().out)
    for option in re.findall(r"--[a-z_.]+", page):
        assert any(f"{option} " in text for text in helps), option
