"""Creation of a new folder for a command's output, which appears under its name only when complete."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxengine.models.params.errors import ModelFileError

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`, "FOLDER.part", and rename it to `folder` at the end.

    Missing parents are created and are never removed. After an exception, Ctrl-C, or a signal that ends the process,
    "FOLDER.part" is removed with its content.

    Raises ModelFileError if either folder exists or cannot be written, and for any OSError inside the context.
    """
    if folder.exists() or folder.is_symlink():
        raise ModelFileError(folder, "exists; a checkpoint is written to a new folder")
    part = folder.with_name(f"{folder.name}.part")
    with _signals_raise():
        try:
            part.mkdir(parents=True)
        except FileExistsError:
            text = (
                "exists, for a checkpoint is being written or was never finished; remove it if no process is writing it"
            )
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
    """Remove a folder, repeatedly, as threads may still write to it.

    Returns once the folder has been absent for four checks in a row, which takes at least a fifth of a second. Gives up
    silently after about five seconds.
    """
    away = 0
    for _ in range(100):
        away = 0 if part.exists() else away + 1
        if away == 4:
            return
        shutil.rmtree(part, ignore_errors=True)
        time.sleep(0.05)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Context in which SIGINT raises KeyboardInterrupt, and SIGTERM and SIGHUP raise SystemExit, as soon as a library
    call returns.

    Ignored signals stay ignored. The earlier handlers are restored at the end. Outside the main thread nothing is
    changed.
    """
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
    """Raise KeyboardInterrupt for SIGINT, and SystemExit with status 128 + `number` for other signals."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # the convention of shells
