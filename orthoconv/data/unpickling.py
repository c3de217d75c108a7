"""The python batches of CIFAR-10, which are pickles, read without trust: no import, no call, no memory beyond the file.

Nothing of numpy is called. What a batch asks for by name is a stand-in, which keeps the bytes of an array.
"""

__all__ = ["unpickle_batch"]

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from orthoconv.data.split import DataError

_MOST_STEPS = 200_000  # of a pickle; a batch has some 60,000
_ALL_STEPS: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch
_REFUSED = (
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.PERSID, pickle.BINPERSID),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.LONG1, pickle.LONG4),
)


def unpickle_batch(data: bytes) -> Tensor:
    """Return the records (n, 1 + pixels), uint8, of a pickle with a list `labels` and an array `data`."""
    batch = _ArraysOnly(data).load()
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= set(batch):
        raise DataError("the batch has no data and labels")
    labels, pixels = batch[b"labels"], batch[b"data"]
    if type(labels) is not list or not all(type(v) is int and 0 <= v <= 255 for v in labels):
        raise DataError("the labels of the batch are not a list of numbers from 0 to 255")
    if not isinstance(pixels, _Array) or len(pixels.shape) != 2 or pixels.shape[0] != len(labels):
        raise DataError(f"the data of the batch are not an array with a row for each of {len(labels)} labels")
    return torch.cat((torch.tensor(labels, dtype=torch.uint8)[:, None], pixels.tensor()), dim=1)


class _Dtype:
    """In place of numpy.dtype: it keeps the name, and there is one that is accepted."""

    def __init__(self, name: Any = None, *flags: Any) -> None:
        if name not in ("u1", b"u1"):
            raise DataError("the batch has an array of other numbers than bytes")

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment, which bytes do not have."""


class _Array:
    """In place of numpy.ndarray: the shape and the bytes of an array."""

    shape: tuple[int, ...] = ()
    content: bytes = b""
    by_columns: bool = False

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, content = state
        sizes = isinstance(shape, tuple) and len(shape) == 2 and all(type(n) is int and n >= 0 for n in shape)
        if not (isinstance(dtype, _Dtype) and isinstance(content, bytes) and type(by_columns) in (bool, int) and sizes):
            raise DataError("the batch has an array that is not a matrix of bytes")
        if shape[0] * shape[1] != len(content):
            raise DataError(f"the batch has {len(content)} bytes for an array of shape {shape}")
        self.shape, self.content, self.by_columns = shape, content, bool(by_columns)

    def tensor(self) -> Tensor:
        """Return the array as a tensor."""
        if not self.content:
            return torch.empty(self.shape, dtype=torch.uint8)
        flat = torch.frombuffer(bytearray(self.content), dtype=torch.uint8)
        return flat.view(self.shape[::-1]).mT if self.by_columns else flat.view(self.shape)


class _Steps(dict[int, Callable[[Any], None]]):
    """The steps that a pickle may take, counted as they are looked up."""

    taken = 0

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self.taken += 1
        if self.taken > _MOST_STEPS or code not in self:
            raise DataError(f"the batch takes the step {bytes([code])!r}, or more than {_MOST_STEPS} steps")
        return super().__getitem__(code)


class _ArraysOnly(pickle._Unpickler):
    """Reads the arrays of the python version, and refuses to import or call anything else.

    It is Python's own Unpickler because the one in C allocates memory up to any index that a damaged file names.
    """

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._room = len(data)  # characters that may still be encoded: each stands in the file
        own = {pickle.SETITEM: _ArraysOnly._set_item, pickle.SETITEMS: _ArraysOnly._set_items}
        own |= {pickle.DICT: _ArraysOnly._make_dict, pickle.BUILD: _ArraysOnly._build}
        codes = {code: step for code, step in _ALL_STEPS.items() if bytes([code]) not in _REFUSED}
        self.dispatch = _Steps(codes | {code[0]: step for code, step in own.items()})  # type: ignore[misc]
        self._allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("_codecs", "encode"): self._encode,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise DataError(f"the batch asks for {module}.{name}, which CIFAR-10 does not need")
        return self._allowed[module, name]

    def _encode(self, text: Any, codec: Any) -> bytes:
        """Encode as Latin-1, in which Python 3 writes bytes for Python 2, and no character twice."""
        if not isinstance(text, str) or codec not in ("latin1", b"latin1"):
            raise DataError("the batch has bytes in another encoding than latin1")
        self._room -= len(text)
        if self._room < 0:
            raise DataError("the batch has the same bytes again and again")
        return text.encode("latin1")

    def _build(self) -> None:
        if not isinstance(self.stack[-2], _Array | _Dtype):
            raise DataError("the batch changes what is not an array")
        _ALL_STEPS[pickle.BUILD[0]](self)

    def _set_item(self) -> None:
        self._check_keys(self.stack[-2:-1])
        _ALL_STEPS[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        self._check_keys(self.stack[::2])
        _ALL_STEPS[pickle.SETITEMS[0]](self)

    def _make_dict(self) -> None:
        self._check_keys(self.stack[::2])
        _ALL_STEPS[pickle.DICT[0]](self)

    def _check_keys(self, keys: list[Any]) -> None:
        """Refuse keys that are not names: the hash of a nested tuple may take forever."""
        if not all(isinstance(key, bytes | str) for key in keys):
            raise DataError("the batch has keys that are not names")
