"""Files of `torch.save`: a zip archive of raw storages, and a pickle that says which tensors are made of them.

The pickle is not unpickled. It is a program for a stack machine, of which the reader here carries out only the few
instructions that torch writes for a tensor or a dict of tensors. Names are never imported or called. Any other
instruction or name is an error. Sizes are checked before anything is allocated.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import open_regular
from jaxengine.models.params.source import WHOLE

_MAX_PROGRAM, _MAX_OBJECTS, _MAX_RANK, _MAX_ENTRIES = 1 << 20, 1 << 16, 8, 1 << 16
_DTYPES = {
    "torch FloatStorage": np.dtype("<f4"),
    "torch HalfStorage": np.dtype("<f2"),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch DoubleStorage": np.dtype("<f8"),
}
_TENSOR, _DICT = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"


class TorchFileError(ValueError):
    """Error of a file that is not a tensor, or a dict of tensors, written by torch.save."""


class _Name(str):
    """Name that the program refers to: module and attribute, separated by a space."""


class _Storage(NamedTuple):
    """Storage of `size` numbers of `dtype`, in the archive's file data/`key`."""

    dtype: np.dtype
    key: str
    size: int


class _Tensor(NamedTuple):
    """Tensor in a storage. offset, strides: counted in numbers, not bytes."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch(file: BinaryIO, limit: int) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name; a tensor that is not in a dict has the name "".

    limit: the most bytes of all tensors together, and of all their storages together. Raises TorchFileError for more
    bytes, and for any file that torch.save would not write, uncompressed and little-endian, for dense tensors of f16,
    bf16, f32 or f64.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > _MAX_ENTRIES or any(each.compress_type != zipfile.ZIP_STORED for each in entries):
                raise TorchFileError("is not an archive of torch.save: its files must be stored as they are")
            programs = [each for each in entries if each.filename.partition("/")[2] == "data.pkl"]
            if len(programs) != 1 or programs[0].file_size > _MAX_PROGRAM:
                raise TorchFileError(f"must have one data.pkl of at most {_MAX_PROGRAM} bytes")
            folder = programs[0].filename.partition("/")[0]
            if f"{folder}/byteorder" in archive.namelist() and archive.read(f"{folder}/byteorder") != b"little":
                raise TorchFileError("must be little-endian")
            tensors = _named(_Program(archive.read(programs[0])).run())
            storages = {each.storage for each in tensors.values()}
            num_bytes = sum(math.prod(each.shape) * each.storage.dtype.itemsize for each in tensors.values())
            num_bytes = max(num_bytes, sum(each.size * each.dtype.itemsize for each in storages))
            if num_bytes > limit:
                raise TorchFileError(f"its tensors have {num_bytes} bytes; allowed: {limit}")
            held = {each: _numbers(archive, f"{folder}/data/", each) for each in storages}
            return {name: _array(held[each.storage], each) for name, each in tensors.items()}
    except TorchFileError:
        raise
    # ValueError: names of files that are no UTF-8, shapes beyond numpy's limits.
    except (zipfile.BadZipFile, LookupError, EOFError, OSError, RuntimeError, ValueError, struct.error) as error:
        raise TorchFileError(f"cannot be read as a file of torch.save ({type(error).__name__})") from error


def _numbers(archive: zipfile.ZipFile, folder: str, storage: _Storage) -> np.ndarray:
    """Return the numbers [size] of a storage, a file of the archive's `folder`. Raises TorchFileError if the file has
    another size, KeyError if it is missing.
    """
    dtype, key, size = storage
    entry = archive.getinfo(folder + key)
    if entry.file_size != size * dtype.itemsize:
        raise TorchFileError(f"storage {key} has {entry.file_size} bytes; the file says {size * dtype.itemsize}")
    return np.frombuffer(archive.read(entry), dtype)


def _array(numbers: np.ndarray, tensor: _Tensor) -> np.ndarray:
    """Return a tensor as a new array, given its storage's numbers. Raises TorchFileError if it extends past their
    end.
    """
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.strides, strict=True))
    if math.prod(tensor.shape) and not 0 <= tensor.offset <= tensor.offset + last < len(numbers):
        raise TorchFileError(f"a tensor reads past the end of storage {tensor.storage.key}")
    flat, strides = numbers[tensor.offset :], [stride * numbers.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False).copy()


def _named(found: Any) -> dict[str, _Tensor]:
    """Return `found`, the program's result, as tensors by name; a single tensor has the name "". Raises TorchFileError
    unless it is a tensor or a dict of tensors with names.
    """
    named = {"": found} if isinstance(found, _Tensor) else found
    if not isinstance(named, dict) or not all(
        isinstance(name, str) and isinstance(each, _Tensor) for name, each in named.items()
    ):
        raise TorchFileError("must hold a tensor or a dict of tensors, and nothing else")
    return named


class _Program:
    """Interpreter of a pickle's program, restricted to the instructions that create tensors. All methods but `run`
    carry out instructions of _CODES, or read their operands.
    """

    def __init__(self, data: bytes):
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._num_steps = 0

    def run(self) -> Any:
        """Run the program and return the only value left on its stack. Raises TorchFileError for an instruction or a
        name that no tensor needs, for more than _MAX_OBJECTS instructions, and for a damaged program.
        """
        try:
            while (code := self._take(1)) != b".":
                self._num_steps += 1
                if self._num_steps > _MAX_OBJECTS or code not in _CODES:
                    raise TorchFileError(f"has an instruction that no tensor needs ({code!r}); nothing of it was run")
                _CODES[code](self)
            (found,) = self._stack
            return found
        except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
            if isinstance(error, TorchFileError):
                raise
            raise TorchFileError("its list of tensors is damaged") from error

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes of the program and move past them. Raises TorchFileError if fewer are left."""
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise TorchFileError("its list of tensors ends early")
        self._at += count
        return taken

    def _number(self, form: str) -> int:
        """Return the next number, of struct format `form`, and move past it. Raises TorchFileError if the program ends
        before.
        """
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _push(self, value: Any) -> None:
        """Push a value on the stack."""
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        """Pop all values above the last mark, in order, and the mark; return the values. Raises IndexError if there is
        no mark, TorchFileError if values below it are gone.
        """
        mark = self._marks.pop()
        self._need(mark)
        values, self._stack[mark:] = self._stack[mark:], []
        return values

    def _need(self, count: int) -> None:
        """Raise TorchFileError if the stack has fewer than `count` values."""
        if len(self._stack) < count:
            raise TorchFileError("its list of tensors takes more values than it makes")

    def _line(self) -> str:
        """Return the ASCII text up to the next line feed and move past it. Raises ValueError if there is none."""
        end = self._data.index(b"\n", self._at)
        return self._take(end - self._at + 1)[:-1].decode("ascii")

    def _name(self) -> None:
        """Read two lines, a module and an attribute, and push them as a _Name. Raises TorchFileError for any name but
        _TENSOR, _DICT and those of _DTYPES.
        """
        name = _Name(f"{self._line()} {self._line()}")
        if name not in (_TENSOR, _DICT, *_DTYPES):
            raise TorchFileError(f"names {name[:100]!r}; allowed: dense tensors of {', '.join(_DTYPES)}")
        self._push(name)

    def _text(self) -> None:
        """Read a string with a length of 32 bits, in UTF-8, and push it. Raises TorchFileError if the program ends
        before, ValueError for other bytes.
        """
        self._push(self._take(self._number("<I")).decode())

    def _long(self) -> None:
        """Read a signed integer with a length of one byte, little-endian, and push it. Raises TorchFileError if the
        program ends before.
        """
        self._push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def _tuple_of(self, count: int) -> None:
        """Replace the top `count` values of the stack by a tuple of them. Raises TorchFileError if there are fewer."""
        self._need(count)
        values = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._push(values)

    def _storage(self) -> None:
        """Pop a tuple that identifies a storage and push its _Storage. Raises TorchFileError for a tuple of another
        form.
        """
        kind, name, key, _, size = self._stack.pop()
        if kind != "storage" or not isinstance(name, _Name) or not isinstance(key, str) or not key.isdecimal():
            raise TorchFileError("names a storage in an unknown way")
        self._push(_Storage(_DTYPES[name], key, _count(size)))

    def _make(self) -> None:
        """Pop arguments and the name of a function below them, and push an empty dict or a _Tensor. Raises
        TorchFileError for any other call.
        """
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise TorchFileError("calls something that makes no tensor")
        if name == _DICT and not arguments:
            self._push({})
            return
        storage, offset, shape, strides, *_ = arguments
        if name != _TENSOR or not isinstance(storage, _Storage) or not len(shape) == len(strides) <= _MAX_RANK:
            raise TorchFileError("makes a tensor in an unknown way")
        self._push(_Tensor(storage, _count(offset), tuple(map(_count, shape)), tuple(map(_count, strides))))

    def _set_items(self) -> None:
        """Pop the keys and values above the last mark, in turns, and add them to the dict below. Raises ValueError for
        a key without a value, and the errors of `_add`.
        """
        values = self._marked()
        self._add(zip(values[::2], values[1::2], strict=True))

    def _set_item(self) -> None:
        """Pop a value and its key, and add them to the dict below. Raises the errors of `_add`."""
        value, key = self._stack.pop(), self._stack.pop()
        self._add([(key, value)])

    def _add(self, items: Iterable[tuple[Any, Any]]) -> None:
        """Add pairs of a key and a value to the dict on top of the stack. Raises TorchFileError for anything but a dict
        and for keys that are not strings: hashing a tuple could take as long as a file likes.
        """
        for key, value in items:
            if type(held := self._stack[-1]) is not dict or not isinstance(key, str):
                raise TorchFileError("sets items of what is no dict of names")
            held[key] = value


def _count(value: Any) -> int:
    """Return `value`, a size or an offset of the program. Raises TorchFileError for anything but an integer from 0 to
    2^48 - 1.
    """
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise TorchFileError("has a size that is none")
    return value


# Instructions by opcode. `b` would set torch's note on versions, which is dropped.
_CODES: dict[bytes, Callable[[_Program], Any]] = {
    b"\x80": lambda run: run._take(1),
    b"}": lambda run: run._push({}),
    b")": lambda run: run._push(()),
    b"(": lambda run: run._marks.append(len(run._stack)),
    b"X": _Program._text,
    b"c": _Program._name,
    b"K": lambda run: run._push(run._number("<B")),
    b"M": lambda run: run._push(run._number("<H")),
    b"J": lambda run: run._push(run._number("<i")),
    b"\x8a": _Program._long,
    b"\x88": lambda run: run._push(True),
    b"\x89": lambda run: run._push(False),
    b"N": lambda run: run._push(None),
    b"q": lambda run: run._memo.update({run._number("<B"): run._stack[-1]}),
    b"r": lambda run: run._memo.update({run._number("<I"): run._stack[-1]}),
    b"h": lambda run: run._push(run._memo[run._number("<B")]),
    b"j": lambda run: run._push(run._memo[run._number("<I")]),
    b"t": lambda run: run._push(tuple(run._marked())),
    b"\x85": lambda run: run._tuple_of(1),
    b"\x86": lambda run: run._tuple_of(2),
    b"\x87": lambda run: run._tuple_of(3),
    b"Q": _Program._storage,
    b"R": _Program._make,
    b"u": _Program._set_items,
    b"s": _Program._set_item,
    b"b": lambda run: run._stack.pop(),
}


class TorchCheckpoint:
    """WeightSource of a file of torch.save with at most 1 GiB of tensors, which is read completely on opening. Raises
    ModelFileError for a larger or invalid file, and for one that cannot be read.
    """

    _LIMIT = 1 << 30

    def __init__(self, path: Path):
        self.path = str(path)
        try:
            with open(open_regular(path)[0], "rb") as file:
                self._tensors = read_torch(file, self._LIMIT)
        except (TorchFileError, OSError) as error:
            raise ModelFileError(self.path, str(error)) from error

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return a copy of these rows and columns of a tensor; of the whole tensor if it has no axes."""
        whole = self._tensors[name]
        return whole[(rows, columns)[: whole.ndim]].copy()

    def close(self) -> None:
        self._tensors = {}
