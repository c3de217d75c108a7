"""Files that name the class of each image beside them: labels.csv, or labels.json."""

__all__ = ["LABEL_FILES", "labelled_files"]

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orthoconv.data.split import DataError

LABEL_FILES = ("labels.csv", "labels.json")
_NAMES = ("file", "filename", "file_name", "image", "path", "name", "id")
_CLASSES = ("label", "class", "category", "target", "y")
_LARGEST = 1 << 27  # bytes of such a file


def labelled_files(folder: Path, name: str, suffixes: Sequence[str]) -> list[tuple[Path, str]]:
    """Return the images that a file of labels names, with the class of each.

    Arguments:
        folder: Folder of the images and of the file. Images outside of it are refused.
        name: Name of the file: CSV with two columns, or others beside `file` and `label`; or JSON, either an object of
            names and classes, or a list of objects with `file` and `label`.
        suffixes: Endings of images, one of which a name may lack.
    """
    path = folder / name
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        text = path.read_text("utf-8-sig")
        rows = _json_rows(json.loads(text)) if path.suffix == ".json" else _csv_rows(text)
        if not rows:
            raise ValueError("it names no images")
        inside = folder.resolve()
        return [(_image(inside, file, suffixes), label) for file, label in rows]
    except (ValueError, OSError, RecursionError, csv.Error) as error:
        raise DataError(f"{path} cannot be used: {error}") from error


def _csv_rows(text: str) -> list[tuple[str, str]]:
    """Return names of files and classes; a header is recognised by its names, or two columns need none.

    >>> _csv_rows("id,file,label" + chr(10) + "1,a.png,cat")
    [('a.png', 'cat')]
    >>> _csv_rows("a.png,cat")
    [('a.png', 'cat')]
    """
    rows = [
        [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)
    ]
    if not rows:
        return []
    header = [cell.lower() for cell in rows[0]]
    files, classes = ([header.index(n) for n in names if n in header] for names in (_NAMES, _CLASSES))
    if classes and files:
        a, b, rows = files[0], classes[0], rows[1:]
    elif len(header) == 2:
        a, b = 0, 1
    else:
        raise ValueError(f"it has the columns {', '.join(header[:10])}; two of them must be called file and label")
    if short := [row for row in rows if len(row) <= max(a, b) or not row[a] or not row[b]]:
        raise ValueError(f"the line {','.join(short[0])!r} lacks a file or a label")
    return [(row[a], row[b]) for row in rows]


def _json_rows(value: Any) -> list[tuple[str, str]]:
    """Return names of files and classes.

    >>> _json_rows({"a.png": "cat"}), _json_rows([{"file": "a.png", "label": 3}])
    ([('a.png', 'cat')], [('a.png', '3')])
    """
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise ValueError(f"it has {type(value).__name__} where an object or a list should be")
    rows = []
    for pair in pairs:
        if isinstance(pair, dict):
            pair = [next((pair[k] for k in keys if k in pair), None) for keys in (_NAMES, _CLASSES)]
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(type(v) in (str, int) for v in pair)):
            raise ValueError(f"{str(pair)[:80]!r} is not a file and its label")
        rows.append((str(pair[0]), str(pair[1])))
    return rows


def _image(folder: Path, name: str, suffixes: Sequence[str]) -> Path:
    """Return the path of an image in the folder; its name may lack the ending."""
    for ending in ("", *suffixes):
        path = folder / f"{name}{ending}"
        if path.is_file():
            if not path.resolve().is_relative_to(folder):
                raise ValueError(f"{name!r} is outside of the folder")
            return path
    raise ValueError(f"there is no image {name!r} in the folder")
