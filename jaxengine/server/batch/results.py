"""Results of a batch on disk: each is written as soon as it is there, so that a batch that was killed can continue.

Next to the output file FILE lies FILE.partial while the batch runs: a line that identifies the batch, then a line for
each result, in the order in which they arrived. At the end they are written to FILE in the order of the requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from jaxengine.config.base.errors import ConfigError
from jaxengine.server.batch.lines import BatchLine


class Kept(NamedTuple):
    """Place of a result in the partial file.

    Attributes:
      offset, size: of its line, in bytes.
      failed: whether its request failed.
    """

    offset: int
    size: int
    failed: bool


class Results:
    """Results of one batch so far.

    Args:
      path: the output file. A link stays, and the file that it names is written.
      batch: identifies the batch, so that results of another one are refused.
      input_file: the file of requests, which is never overwritten.

    Raises:
      ConfigError: `path` cannot be an output file, the results next to it are of another batch, or another process
        writes them.
      OSError: the files cannot be written.

    Attributes:
      known: where results are, by custom_id.
    """

    def __init__(self, path: str, batch: str, input_file: str):
        self.known: dict[str, Kept] = {}
        self._path = _output_path(path)
        self._partial, self._whole = Path(f"{self._path}.partial"), Path(f"{self._path}.whole")
        for each in (self._path, self._partial, self._whole):
            if each.exists() and each.samefile(input_file):
                problem = f"the requests are in {each}, which the results would replace"
                raise ConfigError.because("output_file", problem, "name another output file")
        self._header = json.dumps({"batch": batch}).encode() + b"\n"
        self._file = os.fdopen(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._lock()
            size = self._read()
            self._file.truncate(size)  # what was being written when the batch was killed is no result
            self._file.seek(size)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Lock the partial file, until it is closed. Raises ConfigError if another process has the lock. Does nothing
        on a file system without locks.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another process writes {self._partial}"
            raise ConfigError.because("output_file", problem, "wait for its end, or name another output file") from None
        except OSError:  # a file system without locks
            pass

    def _read(self) -> int:
        """Read the results in the partial file into `known`, up to the first damaged one; return the number of bytes up
        to their end, 0 if there is only a part of the header or nothing.

        Raises ConfigError for a file that does not begin with this batch's header, or with a part of it.
        """
        first = self._file.readline()
        if first != self._header:
            if self._header.startswith(first):
                return 0
            problem = f"{self._partial} has results of another batch"
            raise ConfigError.because("output_file", problem, "name another output file, or remove that file")
        size = len(first)
        for line in self._file:
            try:
                row = json.loads(line) if line.endswith(b"\n") else {}
                custom_id, failed = row["custom_id"], row.get("error") is not None
            except (ValueError, TypeError, KeyError, AttributeError):
                break
            if not isinstance(custom_id, str):
                break
            self.known[custom_id] = Kept(size, len(line), failed)
            size += len(line)
        return size

    @property
    def num_failed(self) -> int:
        """Return the number of results of requests that failed."""
        return sum(kept.failed for kept in self.known.values())

    def add(self, line: BatchLine, result: bytes, *, failed: bool) -> None:
        """Append the result of a request, a whole line, to the partial file, and note it in `known`. Raises OSError,
        for example for a full disk; no result may be added then.
        """
        # Without results nothing says that the file is of this batch: its model or options may be mended.
        if not self.known:
            self._file.write(self._header)
        offset = self._file.tell()
        self._file.write(result)
        self._file.flush()
        self.known[line.custom_id] = Kept(offset, len(result), failed)

    def lines(self, lines: Iterable[BatchLine], *, failed: bool | None = None) -> Iterator[bytes]:
        """Yield the results that are there of `lines`, in their order.

        failed: True for only those of requests that failed, False for only those of others, None for all.
        """
        for line in lines:
            kept = self.known.get(line.custom_id)
            if kept is not None and failed in (None, kept.failed):
                yield os.pread(self._file.fileno(), kept.size, kept.offset)

    def finish(self, lines: Iterable[BatchLine]) -> None:
        """Write the output file whole, with the results of all `lines` in their order, and remove the partial one.

        The file appears complete or not at all. Raises OSError.
        """
        try:
            with open(self._whole, "wb") as file:
                file.writelines(self.lines(lines))
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._whole, self._path)
        finally:
            self._whole.unlink(missing_ok=True)
        self._partial.unlink()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the partial file, and remove it if it has no results. Errors of the block are raised on."""
        if not self.known:
            self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # of the disk that was full already
            self._file.close()


def _output_path(path: str) -> Path:
    """Return the path of the output file without links. Raises ConfigError for a path without a file's name, and for a
    folder, a device or a pipe.
    """
    if not Path(path).name:
        raise ConfigError("output_file", path, "the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):  # renaming would replace a device, such as /dev/null
        raise ConfigError.because("output_file", f"{path} is a folder, a device or a pipe", "name a file")
    return Path(os.path.realpath(path))
