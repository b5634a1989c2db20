"""Recorded traces: writes a line for each request that ends to the file of the option record_trace."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import time
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.engine.extension import Loop, LoopExtension
from jaxengine.records.trace_file import TraceRequest, header_line, request_line
from jaxengine.scheduler.base.request import Request

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30


class Arrivals(LoopExtension):
    """Loop extension that writes a trace for `jaxengine simulate`.

    Blocks are pages, whose digests are hashed once more with a random key that is not stored: ids are equal for equal
    prefixes of one file, and do not reveal the tokens. After the first write error, and after MOST_BYTES, nothing more
    is written, and the engine serves on.
    """

    def __init__(self) -> None:
        """Draw the random key and record the time from which arrival times are counted; `attach` opens the file."""
        self._file: BinaryIO | None = None
        self._key = secrets.token_bytes(32)
        self._began = time.monotonic()
        self._path, self._num_bytes, self._num_requests, self._stopped_by = Path(), 0, 0, ""

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts, open a new file, write the trace's header, and log the file's path.

        Raises ConfigError if the file cannot be written.
        """
        super().attach(loop)
        config = loop.runner.config
        assert config.record_trace is not None
        try:
            self._path, self._file = _new_file(Path(config.record_trace).expanduser())
            self._write(header_line(config.block_size))
        except OSError as error:
            problem = f"record_trace {config.record_trace!r} cannot be written: {error}"
            raise ConfigError.because("record_trace", problem, "name another file") from None
        logger.info("record_trace: when requests come and how long they are is written to %s", self._path)

    def ended(self, request: Request) -> None:
        """Write the request's line, unless it has no output tokens or the trace has been stopped. An arrival before the
        trace began is written as 0. A write error, or a file of more than MOST_BYTES, stops the trace.
        """
        num_output = min(len(request.output_token_ids), request.max_tokens)
        if self._file is None or num_output < 1:
            return
        tokens = np.concatenate([request.prompt_token_ids, request.output_token_ids[:num_output]])
        size = self.loop.runner.config.block_size
        digests = request.extend_page_hashes(tokens, size)[: len(tokens) // size]
        limit = request.max_tokens if request.max_tokens > num_output else None
        arrival = max(0.0, request.arrival_time - self._began)
        line = TraceRequest(arrival, request.num_prompt_tokens, num_output, limit, tuple(map(self._id, digests)))
        try:
            self._write(request_line(line))
            self._num_requests += 1
        except OSError as error:
            self._stop(str(error))
        if self._num_bytes > MOST_BYTES:
            self._stop(f"{self._path} has {MOST_BYTES} bytes")

    def status(self) -> dict[str, Any]:
        own = {"stopped_by": self._stopped_by} if self._stopped_by else {}
        return {"recorded_trace": {"file": str(self._path), "requests": self._num_requests, **own}}

    def shutdown(self) -> None:
        """Close the file. Errors on closing are ignored."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _id(self, digest: bytes) -> int:
        """Return the id of a page in the trace, an int of 63 bits, which is a keyed hash of its digest."""
        return int.from_bytes(hashlib.blake2b(digest, key=self._key, digest_size=8).digest(), "little") >> 1

    def _write(self, line: str) -> None:
        """Append a line to the open file, whole or not at all, and count its bytes. Raises OSError, after removing a
        partial line.
        """
        assert self._file is not None
        content = line.encode()
        try:
            if self._file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._num_bytes)
            raise
        self._num_bytes += len(content)

    def _stop(self, why: str) -> None:
        """Close the file for good, record `why` for the status page, and log it as an error."""
        logger.error("record_trace: NO MORE REQUESTS ARE RECORDED: %s; the engine serves on", why)
        self._stopped_by = why
        self.shutdown()


def _new_file(path: Path) -> tuple[Path, BinaryIO]:
    """Create a file that only its owner may read and open it; return its path and the unbuffered file.

    The path is `path`, or if that exists `path`.1, .2 and so on. Raises OSError if the file cannot be created.
    """
    for number in count():
        own = path if not number else path.with_name(f"{path.name}.{number}")
        try:
            handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        return own, open(handle, "wb", buffering=0)
    raise AssertionError
