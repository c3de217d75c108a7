"""Images of one's own in files of arrays, .npz and IDX, and as arrays in Python."""

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from orthoconv.data import DataError, Split, as_split, batches, load, locate, npz

# Files of arrays


def arrays(n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of shape (n, 6, 5, 3), and labels from 0 to 3, which are also the first byte of each image."""
    labels = np.arange(n) % 4
    pixels = np.random.default_rng(0).integers(0, 256, (n, 6, 5, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = labels
    return pixels, labels


@pytest.mark.parametrize(
    "names", [("x", "y"), ("images", "labels"), ("x_train", "y_train"), ("train_images", "train_labels")]
)
@pytest.mark.parametrize("layout", ["last", "first", "grey", "float", "column"])
def test_npz(tmp_path, names: tuple[str, str], layout: str) -> None:
    x, y = arrays()
    x = {"first": x.transpose(0, 3, 1, 2), "grey": x[..., 0], "float": (x / 255).astype(np.float32)}.get(layout, x)
    np.savez_compressed(tmp_path / "set.npz", **{names[0]: x, names[1]: y[:, None] if layout == "column" else y})
    train, test = load("npz", tmp_path / "set.npz")
    assert train.images.shape == (16, 1 if layout == "grey" else 3, 6, 5)
    assert test.labels.sort().values.tolist() == [0, 1, 2, 3]
    assert train.classes == ("0", "1", "2", "3")
    for split in (train, test):
        assert (split.images[:, 0, 0, 0] * 255).round().long().tolist() == split.labels.tolist()
    assert load("npz", tmp_path)[0].images.shape == train.images.shape, "the folder with the file in it"


def test_npz_with_test_images_and_names(tmp_path) -> None:
    x, y = arrays()
    names = np.array(["ant", "bee", "cow", "doe"])
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x[:4], y_test=y[:4], classes=names)
    np.savez(tmp_path / "b.npz", images=x, labels=names[y], test_images=x[:4], test_labels=names[y[:4]])
    for name in ("a", "b"):
        train, test = load("npz", tmp_path / f"{name}.npz", resize=8)
        assert (len(train.labels), len(test.labels), train.classes) == (20, 4, tuple(names))
        assert test.images.shape == (4, 3, 8, 8)
    np.savez(tmp_path / "c.npz", x=x, y=y + 5)
    assert load("npz", tmp_path / "c.npz")[0].classes == ("5", "6", "7", "8"), "labels need not begin at 0"


class Evil:
    def __reduce__(self):
        return Path("/tmp/owned-by-npz").mkdir, ()


PAIR = {"x": np.zeros((2, 4, 4)), "y": np.array([0, 1])}


def bad_npz(tmp_path: Path, **contents: object) -> Path:
    np.savez(tmp_path / "bad.npz", **contents)
    return tmp_path / "bad.npz"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"a": np.zeros(3)}, r"needs arrays called images and labels, or x and y; it has a"),
        ({"x": np.array([Evil()], dtype=object), "y": np.zeros(1, int)}, "x.npy is an array of object, not of"),
        ({"x": np.zeros((2, 4, 4)) - 1, "y": np.zeros(2, int)}, "floats must be from 0 to 1, got values from -1 to -1"),
        ({"x": np.full((2, 4, 4), 255.0), "y": np.zeros(2, int)}, "got values from 255 to 255; divide them by 255"),
        ({"x": np.full((2, 4, 4), np.nan), "y": np.zeros(2, int)}, "got values from nan to nan"),
        ({"x": np.full((2, 4, 4), 300), "y": np.zeros(2, int)}, "integers must be from 0 to 255, got values from 300"),
        ({"x": np.zeros((2, 16)), "y": np.zeros(2, int)}, r"must have the shape .* got \(2, 16\)"),
        ({"x": np.zeros((2, 4, 4)), "y": np.zeros(3, int)}, "there are 2 images, but 3 labels"),
        ({"x": np.zeros((2, 4, 4)), "y": np.zeros(2)}, r"y must be numbers or names .* got \(2,\) of float64"),
        ({"x": np.zeros((0, 4, 4)), "y": np.zeros(0, int)}, "there are no images"),
        ({"x": np.zeros((2, 4, 4)), "y": np.array([0, 7]), "classes": np.array(["a"])}, "the label 7 is not the"),
        ({**PAIR, "classes": np.array(["a", "b", "a"])}, "bad.npz: each class needs a name .* 'a' is given 2 times"),
        ({**PAIR, "classes": np.array("cat")}, "bad.npz: classes must be a list of names, got 'cat'"),
        ({**PAIR, "classes": np.array(7)}, "bad.npz: classes must be a list of names, got 7"),
        ({**PAIR, "classes": np.array([["a", "b"]])}, "bad.npz: classes must be a list of names, got .*'a', 'b'"),
        ({**PAIR, "x_test": np.zeros((2, 5, 4)), "y_test": np.array([0, 1])},
         r"bad.npz: training images have the shape \(1, 4, 4\) .*, but test images \(1, 5, 4\); --resize 32"),
        ({**PAIR, "x_test": np.zeros((2, 3, 4, 4)), "y_test": np.array([0, 1])}, r"but test images \(3, 4, 4\)$"),
    ],
)  # fmt: skip
def test_npz_that_is_refused(tmp_path, contents, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("npz", bad_npz(tmp_path, **contents))
    assert not Path("/tmp/owned-by-npz").exists()


def test_hostile_npz(tmp_path, monkeypatch) -> None:
    """Sizes that the file does not have, bytes that unpack to many, and what is no archive."""
    path = tmp_path / "bad.npz"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000, 1000), }"
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", head)
    with pytest.raises(DataError, match=r"x.npy has 0 bytes for the shape"):
        load("npz", path)
    monkeypatch.setattr(npz, "_SMALL", 1 << 16)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(1 << 20))
    with pytest.raises(DataError, match=r"x.npy unpacks \d+ bytes to 1048576"):
        load("npz", path)
    monkeypatch.setattr(npz, "_LARGEST", 1 << 16)
    with pytest.raises(DataError, match=r"its arrays have more than 65536 bytes"):
        load("npz", path)
    for data in (b"", b"nonsense", path.read_bytes()[:1000]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"bad.npz cannot be read: .*zip"):
            load("npz", path)
    with pytest.raises(DataError, match=r"a .npz file needs --data_dir, its path, got None"):
        load("npz")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, prefix: str, pixels: np.ndarray, labels: np.ndarray, packed: bool = False) -> None:
    for name, array in ((f"{prefix}images-idx{pixels.ndim}-ubyte", pixels), (f"{prefix}labels-idx1-ubyte", labels)):
        data = gzip.compress(idx(array)) if packed else idx(array)
        (folder / f"{name}{'.gz' if packed else ''}").write_bytes(data)


@pytest.mark.parametrize("packed", [False, True])
def test_any_idx_set(tmp_path, packed: bool) -> None:
    x, y = arrays()
    write_idx(tmp_path, "train-", x[..., 0], y + 1, packed)
    train, test = load("idx", tmp_path)
    assert (len(train.labels), len(test.labels), train.classes) == (16, 4, ("1", "2", "3", "4"))
    write_idx(tmp_path, "t10k-", x[:5, ..., 0], y[:5] + 1)
    train, test = load("idx", tmp_path, resize=4)
    assert (len(train.labels), len(test.labels)) == (20, 5)
    assert test.images.shape == (5, 1, 4, 4)
    write_idx(tmp_path, "other-", x[..., 0], y)
    with pytest.raises(DataError, match=r"needs one file ...images-idx3-ubyte, .* got other-images-idx3-ubyte"):
        load("idx", tmp_path)


def test_idx_with_channels_and_refusals(tmp_path) -> None:
    x, y = arrays()
    write_idx(tmp_path, "emnist-letters-train-", x, y)
    assert load("idx", tmp_path)[0].images.shape == (16, 3, 6, 5)
    path = tmp_path / "emnist-letters-train-images-idx4-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"is damaged: it has 1799 bytes for an array of 20 x 6 x 5 x 3"):
        load("idx", tmp_path)
    (tmp_path / "emnist-letters-train-labels-idx1-ubyte").unlink()
    path.write_bytes(idx(x))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte does not exist, nor with .gz"):
        load("idx", tmp_path)
    with pytest.raises(DataError, match="IDX files need --data_dir"):
        load("idx")


def test_a_path_says_what_it_is(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    x, y = arrays()
    classes, files, numbers = (tmp_path / name for name in ("classes", "files", "numbers"))
    for folder in (files, numbers, *(classes / str(label) for label in range(4))):
        folder.mkdir(parents=True)
    for k, label in enumerate(y):
        image.fromarray(x[k]).save(classes / str(label) / f"{k}.png")
    np.savez(files / "set.npz", x=x, y=y)
    write_idx(numbers, "train-", x[..., 0], y)
    for path, kind in ((classes, "folder"), (files, "npz"), (files / "set.npz", "npz"), (numbers, "idx")):
        assert locate(str(path)) == (kind, path)
        assert len(load(str(path))[0].labels) == 16
    for name in ("", "nowhere", "digits", "x" * 5000, "a\0b"):
        assert locate(name) == (name, None)


# Arrays in Python


def test_arrays_and_tensors_become_a_split() -> None:
    x, y = arrays()
    for images in (x, torch.from_numpy(x), x.transpose(0, 3, 1, 2), x.astype(np.uint16), x.astype(">i4"), x / 255):
        split = as_split(images, y)
        assert split.images.dtype == torch.float32
        torch.testing.assert_close(split.images, torch.from_numpy(x).permute(0, 3, 1, 2) / 255)
        assert torch.equal(split.labels, torch.from_numpy(y))
    assert as_split(x > 9, [0] * 20).images.unique().tolist() == [0, 1]
    named = as_split(x[:3], np.array(["b", "a", "b"]))
    assert (named.labels.tolist(), named.classes) == ([1, 0, 1], ("a", "b"))
    assert as_split(x[:2], [1, 0], ["cat", "dog"]).classes == ("cat", "dog")
    assert [len(piece.labels) for piece in batches((x, y), 8)] == [8, 8, 4]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 3, 8, 3)), [0, 1], r"images of shape \(2, 3, 8, 3\) may have channels first or last"),
        (np.zeros((2, 4, 4)), [0, -1], "labels must be from 0 to 1, .* got -1 to 0"),
        (np.zeros((2, 4, 4)), [0, 2], "labels must be from 0 to 1, the number of the last class, got 0 to 2"),
        (np.zeros((2, 4, 4)), [0.5, 1], r"labels must be integers of shape \(n,\), got \(2,\) of torch.float64"),
        (np.zeros((2, 4, 4)), ["cat", "eel"], "the class 'eel' is not among those of the training images: cat, dog"),
        (np.zeros((2, 4, 4)), object(), "labels must be numbers, got object"),
        ("text", [0], "images must be numbers, got <U4"),
    ],
)
def test_arrays_that_are_refused(images, labels, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_split(images, labels, ["cat", "dog"])


def test_names_of_classes_that_are_refused() -> None:
    for names, message in ((["cat", "cat"], "'cat' is given 2 times"), ("cat", "must be a list of names, got 'cat'")):
        with pytest.raises(DataError, match=message):
            as_split(np.zeros((2, 4, 4)), [0, 1], names)


def test_a_split_is_a_pair() -> None:
    split = Split(torch.rand(3, 1, 2, 2), torch.arange(3), ["a", "b", "c"])
    images, labels = split
    assert len(split) == 2
    assert torch.equal(split[1], labels)
    assert split.first(2).classes == split.classes == ("a", "b", "c")
    assert Split(images, labels).classes is None
    assert torch.load(saved(split), weights_only=False).labels.tolist() == [0, 1, 2]


def saved(value: object) -> io.BytesIO:
    """What torch writes, for a loader that sends splits to other processes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file
