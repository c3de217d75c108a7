"""Files as arguments of a command, any number of them: jsonargparse takes a list as one argument."""

__all__ = ["gather_files", "picture_files"]

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from orthoconv.data import DataError
from orthoconv.data.decoding import SUFFIXES

_MOST_BYTES = 1 << 28  # that are read from the standard input
_COMMAND = "certify"
_FLAGS = ("--resize",)
_WITHOUT_VALUE = ("-h", "--help", "--print_config")


def gather_files(args: list[str]) -> list[str]:
    """Make one list of the files that `orthoconv certify` is given, in whatever order they stand among its options.

    >>> gather_files(["certify", "runs/digits", "a.png", "--resize", "b.png", "--format", "csv", "-"])
    ['certify', '--resize=true', '--format=csv', 'runs/digits', '["a.png", "b.png", "-"]']
    >>> gather_files(["verify", "a", "b"])
    ['verify', 'a', 'b']
    """
    if args[:1] != [_COMMAND]:
        return args
    options: list[str] = []
    places: list[str] = []
    left = args[1:]
    while left:
        one = left.pop(0)
        if one == "--":
            places += left
            break
        if one == "-" or not one.startswith("-"):
            places.append(one)
        elif one in _FLAGS:
            options.append(f"{one}={left.pop(0) if left and left[0] in ('true', 'false') else 'true'}")
        elif "=" in one or one in _WITHOUT_VALUE or not left:
            options.append(one)
        else:
            options.append(f"{one}={left.pop(0)}")  # or the value of an unknown option would be taken for the model
    files = [json.dumps(places[1:])] if len(places) > 1 else []
    return [_COMMAND, *options, *places[:1], *files]


def picture_files(names: Sequence[str]) -> Iterator[tuple[str, Path | bytes]]:
    """Yield what each image is called, and its path, or its bytes if it comes by the standard input, named -.

    Of a folder, all image files are yielded, those of its subfolders too, in the order of their names.
    """
    if names.count("-") > 1:
        raise ValueError("the standard input has one image, but - was given more than once")
    for name in names:
        if name == "-":
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise DataError(f"the standard input has more than {_MOST_BYTES} bytes, which no image should have")
            yield "-", data
        elif Path(name).is_dir():
            found = sorted(p for p in Path(name).rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            if not found:
                raise DataError(f"{name} has no images ({', '.join(sorted(SUFFIXES))})")
            yield from ((str(path), path) for path in found)
        else:
            yield name, Path(name)
