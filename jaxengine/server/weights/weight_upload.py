"""Weights sent by a trainer: a safetensors file that arrives in pieces and is stored until the engine has read it.

No memory is allocated for sizes that a header claims: the header must be within its limits, and its tensors must fit
the disk, before their bytes are accepted. The engine checks names, shapes and numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jaxengine.scheduler.base.errors import OverloadedError, RequestError

FIELD = "params"
# Largest size of a header, and largest number of tensors in it. The largest checkpoints have a hundred thousand.
MAX_HEADER_BYTES, MAX_TENSORS = 16 << 20, 200_000
# Uploads that one process takes at a time.
MAX_UPLOADS = 2
# Bytes that an upload leaves free on the disk.
_SPARE_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
_num_uploads = 0


@contextlib.asynccontextmanager
async def uploaded(folder: str | None, pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Async context manager that first receives a file in pieces into a new file of `folder`, then yields its path, and
    removes the file at the end.

    folder: weight_upload_dir. Raises RequestError if `folder` is None or cannot be written, if the file is incomplete
    or not safetensors, and if the disk has no room for it; OverloadedError if MAX_UPLOADS are in progress in this
    process.
    """
    global _num_uploads
    if folder is None:
        raise RequestError("no weights can be sent: the server was started without weight_upload_dir", param=FIELD)
    if _num_uploads >= MAX_UPLOADS:
        raise OverloadedError(f"{MAX_UPLOADS} uploads of weights are under way; try again when one has ended")
    _num_uploads += 1
    folder = os.path.expanduser(folder)
    descriptor, path = -1, ""
    try:
        # Not on a thread, whose file a cancelled caller would leave behind.
        descriptor, path = _created(folder)
        await _receive(descriptor, folder, pieces)
        yield path
    finally:
        _num_uploads -= 1
        if path:
            os.close(descriptor)
            Path(path).unlink(missing_ok=True)


def _created(folder: str) -> tuple[int, str]:
    """Create an empty file in a folder. Returns its open descriptor, for the caller to close, and its path. Raises
    RequestError if the file cannot be created.
    """
    try:
        return tempfile.mkstemp(prefix="upload-", suffix=".safetensors", dir=folder)
    except OSError as error:
        raise RequestError(f"weight_upload_dir cannot be written: {error.strerror}", param=FIELD) from None


async def _receive(descriptor: int, folder: str, pieces: AsyncIterator[bytes]) -> None:
    """Write all pieces of a safetensors file to `descriptor`.

    Raises RequestError for an unusable header (`_size_of`), for fewer or more bytes than the header describes, and if
    the bytes cannot be written. folder: the folder of the file, whose free space is checked.
    """
    block, received, whole = bytearray(), 0, None
    async for piece in pieces:
        block += piece
        received += len(piece)
        if whole is None:
            whole = await asyncio.to_thread(_size_of, block, folder)
        if whole is not None and received > whole:
            raise RequestError(f"params goes on after the {whole} bytes that its header describes", param=FIELD)
        if whole is not None and len(block) >= _BLOCK_BYTES:
            await asyncio.to_thread(_write, descriptor, block)
            block = bytearray()
    if whole is None or received < whole:
        wanted = "its header" if whole is None else f"the {whole} that its header describes"
        raise RequestError(f"params ends after {received} bytes, before {wanted}", param=FIELD)
    await asyncio.to_thread(_write, descriptor, block)


def _write(descriptor: int, block: bytearray) -> None:
    """Write a whole block to a file's descriptor, blocking. Raises RequestError if that fails, for example on a full
    disk.
    """
    view = memoryview(block)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise RequestError(f"params cannot be kept in weight_upload_dir: {error.strerror}", param=FIELD) from None


def _size_of(start: bytearray, folder: str) -> int | None:
    """Return the size in bytes of the whole safetensors file that begins with `start`; None while `start` does not yet
    contain the whole header. Raises RequestError for a header that is too large or unusable, and for a file larger than
    the free disk space of `folder` less a reserve.
    """
    if len(start) < 8:
        return None
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise RequestError(f"params has a header of {header_bytes} bytes; allowed: {MAX_HEADER_BYTES}", param=FIELD)
    if len(start) < 8 + header_bytes:
        return None
    whole = 8 + header_bytes + _data_bytes(bytes(start[8 : 8 + header_bytes]))
    free = shutil.disk_usage(folder).free - _SPARE_BYTES
    if whole > free:
        raise RequestError(f"params has {whole} bytes; weight_upload_dir has room for {max(free, 0)}", param=FIELD)
    return whole


def _data_bytes(header: bytes) -> int:
    """Return the size in bytes of the data that a safetensors header describes: the largest end of a tensor, 0 without
    tensors. header: the JSON text, without the length before it. Raises RequestError for a malformed header, and for
    more than MAX_TENSORS tensors.
    """
    if header.count(b"{") + header.count(b"[") > 3 * MAX_TENSORS + 2 or header.count(b",") > 24 * MAX_TENSORS:
        raise RequestError(f"params describes more than {MAX_TENSORS} tensors", param=FIELD)
    try:
        entries = json.loads(header)
        return max((_end_of(entry) for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RequestError("params does not begin with the header of a safetensors file", param=FIELD) from None


def _end_of(entry: Any) -> int:
    """Return the end of a tensor's data, in bytes from the beginning of all data. entry: the tensor's value in the
    header. Raises ValueError, TypeError or KeyError for a malformed entry.
    """
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError(end)
    return end
