"""Runs a function in a fork of the tests' process, as os.fork, multiprocessing and preloading servers make them."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable
from typing import Any

_SECONDS = 60.0


def in_fork(function: Callable[[], Any]) -> str:
    """What `function` returns in a fork, as text, or the error that it raises there. Fails if it does neither."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that forks of threaded programs may hang is what is tested
        pid = os.fork()
    if pid == 0:
        try:
            try:
                said = repr(function())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert select.select([read], [], [], _SECONDS)[0], "the fork hangs"
        return os.read(read, 1 << 16).decode()
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
