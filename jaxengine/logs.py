"""Format of log lines, and their output around progress bars.

The format is vLLM's, for tools that read its logs: level, time, source line, text, prefixed with the name of the
process where there are several. Only commands and server processes use it; a program that uses the engine as a library
configures its own logging. A server's lines may be JSON objects instead (`log_as_json`), one for each message.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] "
_TIME = "%m-%d %H:%M:%S"


def log_to_stderr(process: str | None = None) -> None:
    """Show the engine's log lines and other packages' warnings on standard error, unless logging is configured already.

    Lets the logger "jaxengine" pass messages from INFO on in either case, and replaces sys.stderr by a stream that
    ignores errors: what cannot be written, on a full disk or without a reader, is lost, and neither a log line nor a
    progress bar ends the process. process: name of this process, put before each line; None when there is only one
    process.
    """
    if sys.stderr is not None and not isinstance(sys.stderr, _Forgiving):
        sys.stderr = _Forgiving(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
    handler = _BesideBars()
    handler.setFormatter(_Lines("" if process is None else f"({process} pid={os.getpid()}) "))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("jaxengine").setLevel(logging.INFO)


def log_as_json(process: str) -> None:
    """Switch the log handlers of `log_to_stderr` to JSON objects, one for each message. process: name of this process,
    in each of them.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _BesideBars):
            handler.setFormatter(_JsonLines(process))


def only_warnings() -> None:
    """Hide the engine's log lines below warnings, for commands that converse with a person on the terminal."""
    logging.getLogger("jaxengine").setLevel(logging.WARNING)


class _Forgiving:
    """Wrapper of a text stream that ignores errors of writing and flushing; all other attributes are those of the
    stream.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or drop it if that fails; return the number of its characters."""
        with contextlib.suppress(OSError, ValueError):  # full, or closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore errors."""
        with contextlib.suppress(OSError, ValueError):  # full, or closed
            self._stream.flush()


class _Lines(logging.Formatter):
    """Log formatter that repeats the prefix on each line of a message of several lines."""

    def __init__(self, process: str):
        super().__init__("%(message)s")
        self._before = logging.Formatter(process + _FORMAT, _TIME)

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record, each with the prefix."""
        record.asctime = self._before.formatTime(record, _TIME)
        before = self._before.formatMessage(record)
        return "\n".join(before + line for line in super().format(record).split("\n"))


class _JsonLines(logging.Formatter):
    """Log formatter that writes a message as a JSON object in one line, with its time in UTC (RFC 3339)."""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a JSON object in one line: time, level, process, pid, logger, place, message and any
        exception as text.
        """
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "place": f"{record.filename}:{record.lineno}",
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _BesideBars(logging.StreamHandler):
    """Log handler on standard error that clears progress bars while it writes a line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, with progress bars cleared in the meantime if tqdm is in use."""
        tqdm = sys.modules.get("tqdm")  # without it there are no bars, and `--help` need not import it
        if tqdm is None:
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)
