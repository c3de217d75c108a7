"""Archives that nobody vouches for: no member is written anywhere, no link is followed."""

import tarfile
from pathlib import Path

import pytest
import torch
from archives import batch, package, small_records, tar_of

from orthoconv.data import DataError
from orthoconv.data import cifar as cifar10


def everything(folder: Path) -> dict[str, int]:
    return {str(p): p.lstat().st_mtime_ns for p in folder.rglob("*")}


@pytest.mark.parametrize("prefix", ["", "../../", "/", "../../../../../../../../tmp/", "a/../../b/"])
def test_members_of_an_archive_stay_in_memory(offline, tmp_path, prefix: str) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    members = {f"{prefix}{name}.bin": batch(k) for k, name in enumerate(cifar10._BATCHES)}
    (folder / "cifar-10-binary.tar.gz").write_bytes(tar_of(members))
    before, outside = everything(tmp_path), {str(p) for p in Path("/tmp").glob("*_batch*")}
    assert torch.equal(cifar10.cifar10_records(folder), small_records())
    assert everything(tmp_path) == before
    assert {str(p) for p in Path("/tmp").glob("*_batch*")} == outside


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_links_and_devices_in_an_archive_are_not_followed(offline, tmp_path, kind: bytes) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(batch(0))
    path = tmp_path / "cifar-10-binary.tar.gz"
    members = {f"{name}.bin": batch(k) for k, name in enumerate(cifar10._BATCHES)}
    del members["data_batch_1.bin"]
    before = everything(tmp_path)
    for target in (str(secret), "../secret.bin", "data_batch_1.bin", "data_batch_2.bin"):
        path.write_bytes(tar_of(members, {"data_batch_1.bin": (kind, target)}))
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged: the archive lacks data_batch_1"):
            cifar10.cifar10_records(tmp_path)
    before[str(path)] = path.lstat().st_mtime_ns
    assert everything(tmp_path) == before


def test_members_of_a_package(offline, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cifar10, "_IMAGES", 10)
    path, files = tmp_path / "package.tgz", package()
    path.write_bytes(tar_of({**files, "../../evil": b"x", "/evil": b"x"}))
    assert torch.equal(torch.cat(list(cifar10._sheets(path))), small_records())
    assert [p.name for p in tmp_path.rglob("*")] == ["package.tgz"]
    secret = tmp_path / "secret.json"
    secret.write_bytes(files.pop("package/test_lables.json"))
    for target in (str(secret), "../secret.json", "test_lables.json"):
        path.write_bytes(tar_of(files, {"package/test_lables.json": (tarfile.SYMTYPE, target)}))
        with pytest.raises(DataError, match=r"its member package/test_lables\.json is not a file of at most"):
            list(cifar10._sheets(path))


def test_large_members_are_refused_before_they_are_read(monkeypatch) -> None:
    members = {f"{name}.bin": batch(k) for k, name in enumerate(cifar10._BATCHES)}
    assert torch.equal(cifar10._from_archive(tar_of(members)), small_records())
    monkeypatch.setattr(cifar10, "_LARGEST", 30_000)
    with pytest.raises(DataError, match=r"its member data_batch_1\.bin is not a file of at most 30000 bytes"):
        cifar10._from_archive(tar_of(members))
