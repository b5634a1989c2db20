"""Results of a batch on disk. Each is written as soon as it exists, so that a batch that was killed can continue.

While the batch runs, FILE.partial lies next to the output file FILE: a line that identifies the batch, then a line for
each result, in order of arrival. At the end the results are written to FILE in the order of the requests.
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
from jaxengine.server.batch.folder import write_whole
from jaxengine.server.batch.lines import BatchLine


class Kept(NamedTuple):
    """Location of a result in the partial file.

    Attributes:
      offset: byte offset of its line.
      size: size of its line in bytes, line break included.
      failed: whether its request failed.
    """

    offset: int
    size: int
    failed: bool


class Results:
    """Results of one batch so far, in a partial file that is locked while this object is open.

    Args:
      path: the output file. If it is a link, the file to which the link leads is written.
      batch: identifies the batch, so that results of another one are refused.
      input_file: the file of requests, which is never overwritten.

    Raises:
      ConfigError: `path` cannot be an output file or is the input file, the partial file has results of another batch,
        or another process writes it.
      OSError: the files cannot be written.

    Attributes:
      known: location of each result, by custom_id.
    """

    def __init__(self, path: str, batch: str, input_file: str):
        """Open and lock the partial file, read the results in it, and drop an incomplete one at its end. See the class
        for arguments and errors.
        """
        self.known: dict[str, Kept] = {}
        self._path = _output_path(path)
        self._partial = Path(f"{self._path}.partial")
        for each in (self._path, self._partial, Path(f"{self._path}.whole")):  # of write_whole
            if each.exists() and each.samefile(input_file):
                problem = f"the requests are in {each}, which the results would replace"
                raise ConfigError.because("output_file", problem, "name another output file")
        self._header = json.dumps({"batch": batch}).encode() + b"\n"
        self._file = os.fdopen(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._lock()
            size = self._read()
            self._file.truncate(size)  # drop the result that was being written when the batch was killed
            self._file.seek(size)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Lock the partial file until it is closed. Raises ConfigError if another process holds the lock, or removed
        the file after it was opened here. On a file system without locks, does nothing.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._partial.exists() or not os.path.samestat(os.fstat(self._file.fileno()), self._partial.stat()):
                raise BlockingIOError
        except BlockingIOError:
            problem = f"another process writes {self._partial}"
            raise ConfigError.because("output_file", problem, "wait for its end, or name another output file") from None
        except OSError:  # a file system without locks
            pass

    def _read(self) -> int:
        """Read the results in the partial file into `known`, up to the first damaged line. Return the offset in bytes
        at which they end; 0 if the file is empty or has only a part of the header.

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
        """Number of results whose request failed."""
        return sum(kept.failed for kept in self.known.values())

    def add(self, line: BatchLine, result: bytes, *, failed: bool) -> None:
        """Append the result of a request, a whole line, to the partial file, and add it to `known`. The first result is
        preceded by the header.

        Raises OSError; the caller must not add further results then.
        """
        # The header comes with the first result: before that, the batch's model or options may still be corrected. A
        # batch that was killed while it wrote its first result has left the header alone.
        if not (offset := self._file.tell()):
            offset = self._file.write(self._header)
        self._file.write(result)
        self._file.flush()
        self.known[line.custom_id] = Kept(offset, len(result), failed)

    def lines(self, lines: Iterable[BatchLine], *, failed: bool | None = None) -> Iterator[bytes]:
        """Yield the stored results of `lines`, in the order of `lines`; those without a result are skipped.

        failed: True for results of failed requests only, False for those of other requests only, None for all.
        """
        for line in lines:
            kept = self.known.get(line.custom_id)
            if kept is not None and failed in (None, kept.failed):
                yield os.pread(self._file.fileno(), kept.size, kept.offset)

    def finish(self, lines: Iterable[BatchLine]) -> None:
        """Write the output file with the results of `lines`, in their order, and remove the partial file. Lines without
        a result are skipped.

        The output file appears complete or not at all (`write_whole`), but one that exists and is empty is written in
        place. Raises OSError if it cannot be written; the partial file then stays.
        """
        if self._path.exists() and not self._path.stat().st_size:
            _fill(self._path, self.lines(lines))
        else:
            write_whole(self._path, self.lines(lines))
        self._partial.unlink()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the partial file, and remove it if it has no results. Errors of the block propagate."""
        if not self.known:
            self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the disk may be full, which has been reported already
            self._file.close()


def _fill(path: Path, lines: Iterable[bytes]) -> None:
    """Write `lines` to an existing, empty file in place. Raises OSError if writing fails, and any error of `lines`; the
    file is then empty.
    """
    try:
        with open(path, "r+b") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.truncate(path, 0)
        raise


def _output_path(path: str) -> Path:
    """Return the path of the output file with links resolved. Raises ConfigError for a path without a file name, and
    for a folder, a device or a pipe.
    """
    if not Path(path).name:
        raise ConfigError("output_file", path, "the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):  # renaming would replace a device, such as /dev/null
        raise ConfigError.because("output_file", f"{path} is a folder, a device or a pipe", "name a file")
    return Path(os.path.realpath(path))
