"""How the log lines of a process look, and how they keep clear of progress bars.

The form is vLLM's, so that what reads its logs reads ours: level, time, place, text; in front of them the name of the
process where there are several. For commands and a server's processes: a program that uses the engine as a library
sets up its own logging. Knows nothing of what is logged.
"""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] "
_TIME = "%m-%d %H:%M:%S"


def log_to_stderr(process: str | None = None) -> None:
    """Shows the engine's lines, and other packages' warnings, unless logging has been set up already.

    process: what this process is to the others, for lines of several.
    """
    handler = _BesideBars()
    handler.setFormatter(_Lines("" if process is None else f"({process} pid={os.getpid()}) "))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("jaxengine").setLevel(logging.INFO)


def only_warnings() -> None:
    """From here on a person reads on the same terminal."""
    logging.getLogger("jaxengine").setLevel(logging.WARNING)


class _Lines(logging.Formatter):
    """What is said of a message stands in front of each of its lines, so that a search finds all of them."""

    def __init__(self, process: str):
        super().__init__("%(message)s")
        self._before = logging.Formatter(process + _FORMAT, _TIME)

    def format(self, record: logging.LogRecord) -> str:
        record.asctime = self._before.formatTime(record, _TIME)
        before = self._before.formatMessage(record)
        return "\n".join(before + line for line in super().format(record).split("\n"))


class _BesideBars(logging.StreamHandler):
    """Standard error, with progress bars out of the way while a line is written."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")  # without it there are no bars, and `--help` need not import it
        if tqdm is None:
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)
