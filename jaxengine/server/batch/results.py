"""Results of a batch on disk: each is written as soon as it is there, so that a batch that was killed can continue.

Next to the output file FILE lies FILE.partial while the batch runs: a line that identifies the batch, then a line for
each result, in the order in which they arrived. At the end they are written to FILE in the order of the requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxengine.config.errors import ConfigError
from jaxengine.server.batch.lines import BatchLine, in_order


class Results:
    """Results of one batch so far.

    Args:
      path: the output file.
      batch: identifies the batch, so that results of another one are refused.

    Raises:
      ConfigError: the results next to the output file are of another batch.
      OSError: the files cannot be written.

    Attributes:
      known: lines of results, by custom_id.
    """

    def __init__(self, path: str, batch: str):
        self.known: dict[str, bytes] = {}
        self._path, self._partial = Path(path), Path(f"{path}.partial")
        header = json.dumps({"batch": batch}).encode() + b"\n"
        size = self._read(header) if self._partial.is_file() else 0
        self._file = open(self._partial, "r+b" if size else "wb")  # noqa: SIM115  # closed by __exit__
        self._file.truncate(size)  # what was being written when the batch was killed is no result
        self._file.seek(size)
        if not size:
            self._write(header)

    def _read(self, header: bytes) -> int:
        """Read the complete results in the partial file into `known`; return the number of bytes up to their end.

        header: the line that identifies the batch, with which the file must begin.
        """
        with open(self._partial, "rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return 0
            if first != header:
                problem = f"{self._partial} has results of another batch"
                raise ConfigError.because("output_file", problem, "name another output file, or remove that file")
            size = len(first)
            for line in file:
                try:
                    custom_id = json.loads(line)["custom_id"] if line.endswith(b"\n") else None
                except (ValueError, TypeError, KeyError):
                    custom_id = None
                if not isinstance(custom_id, str):
                    break
                self.known[custom_id] = line
                size += len(line)
        return size

    def add(self, line: BatchLine, result: bytes) -> None:
        """Store the result of a request. Raises OSError, for example for a full disk."""
        self._write(result)
        self.known[line.custom_id] = result

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def finish(self, lines: Sequence[BatchLine]) -> None:
        """Write the output file whole, with the results of all `lines` in their order, and remove the partial one.

        The file appears complete or not at all. Raises OSError.
        """
        whole = self._path.with_name(f"{self._path.name}.whole")
        with open(whole, "wb") as file:
            file.writelines(in_order(lines, self.known))
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, self._path)
        self._partial.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
