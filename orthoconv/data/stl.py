"""STL-10 (Coates, Ng and Lee, 2011), from the official binary files."""

__all__ = ["stl10"]

import hashlib
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from orthoconv.data.fetch import fetch
from orthoconv.data.split import DataError, Progress, Split, split_of
from orthoconv.files import cache_dir, write_atomically

_ARCHIVE = "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz"
_ARCHIVE_MD5 = "91f7769df0f17e558f3565bffb0c7dfb"
_NAME = "stl10_binary.tar.gz"
_SIDE = 96
_CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_IMAGES = {"train": 5000, "test": 8000}


def stl10(data_dir: Path | None = None, progress: Progress | None = None) -> tuple[Split, Split]:
    """Return 5,000 training and 8,000 test images, 96 x 96, of ten classes.

    Arguments:
        data_dir: Folder with the official .bin files, in it or in stl10_binary, or with the official archive, whose
            digest is checked. By default the cache; without an archive there, it is downloaded (2.6 GB).
        progress: Called during a download with bytes so far and in all.
    """
    for folder in () if data_dir is None else (data_dir, data_dir / "stl10_binary"):
        if (folder / "train_X.bin").is_file():
            return _split(partial(_content, folder), str(folder))
    archive = (data_dir or cache_dir()) / _NAME
    if not archive.is_file():
        if data_dir is not None:
            raise DataError(f"{data_dir} has neither train_X.bin nor {_NAME}")
        _download(archive, progress)
    if (digest := _md5(archive)) != _ARCHIVE_MD5:
        raise DataError(f"{archive} has the MD5 {digest}, not {_ARCHIVE_MD5}; delete it to download it again")
    return _from_archive(archive)


def _split(read: Callable[[str], bytes], source: str) -> tuple[Split, Split]:
    return _part(read, "train", source), _part(read, "test", source)


def _part(read: Callable[[str], bytes], part: str, source: str) -> Split:
    """Read a split: pixels column by column in each of three planes, and labels from 1 to 10."""
    n = _IMAGES[part]
    pixels, labels = (torch.frombuffer(bytearray(read(f"{part}_{k}.bin")), dtype=torch.uint8) for k in ("X", "y"))
    if len(pixels) != n * 3 * _SIDE**2 or len(labels) != n:
        raise DataError(
            f"{source}: {part}_X.bin and {part}_y.bin have {len(pixels)} and {len(labels)} bytes, "
            f"not {n * 3 * _SIDE**2} and {n}"
        )
    if not bool(((labels >= 1) & (labels <= 10)).all()):
        raise DataError(f"{source}: {part}_y.bin has labels from {labels.min()} to {labels.max()}, not from 1 to 10")
    return split_of(pixels.view(-1, 3, _SIDE, _SIDE).mT.contiguous(), labels - 1, _CLASSES)


def _content(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not data:
        raise DataError(f"{path} is empty")
    return data


def _from_archive(path: Path) -> tuple[Split, Split]:
    """Read the four files of the archive in memory: no member can write outside of a folder."""
    wanted = {f"{part}_{k}.bin" for part in _IMAGES for k in ("X", "y")}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if member.isfile() and member.size and name in wanted:
                    content = archive.extractfile(member)
                    assert content is not None
                    contents[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, ValueError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if missing := sorted(wanted - set(contents)):
        raise DataError(f"{path} lacks {', '.join(missing)}")
    return _split(contents.__getitem__, str(path))


def _download(path: Path, progress: Progress | None) -> None:
    try:
        write_atomically(path, lambda file: fetch(_ARCHIVE, _ARCHIVE_MD5, file.write, progress))
    except OSError as error:
        raise DataError(f"STL-10 was not found: {path} does not exist, and {_ARCHIVE} gave: {error}") from error


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
