"""A folder that a command writes: under its name whole or not at all. Knows nothing of what is written."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.weights.errors import ModelFileError

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write to, beside `folder`, which it becomes in the end; nothing is left of it after an
    exception, Ctrl-C, or a signal that ends the process.

    Raises ModelFileError for one that exists or cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise ModelFileError(folder, "exists; a checkpoint is written to a new folder")
    part = folder.with_name(f"{folder.name}.part")
    with _told():
        try:
            part.mkdir(parents=True)
        except FileExistsError:
            text = "exists, for a checkpoint is being written or was never finished; remove it if nobody writes it"
            raise ModelFileError(part, text) from None
        except OSError as error:
            raise ModelFileError(folder, f"cannot be written: {error}") from error
        try:
            yield part
            part.rename(folder)
        except OSError as error:
            raise ModelFileError(folder, f"cannot be written: {error}") from error
        finally:
            if part.exists():
                _remove(part)


def _remove(part: Path) -> None:
    """Also what threads of a library that failed write meanwhile: the folder is to stay away for a while."""
    away = 0
    for _ in range(100):
        away = 0 if part.exists() else away + 1
        if away == 4:
            return
        shutil.rmtree(part, ignore_errors=True)
        time.sleep(0.05)


@contextmanager
def _told() -> Iterator[None]:
    """Signals that end a process are exceptions inside, which come when a call of a library has ended: whoever ends
    the process sooner (jaxengine.commands.process) leaves what was begun. Those that are ignored stay so."""
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _ENDS if ours}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: Any) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # as shells have it
