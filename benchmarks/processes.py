"""Processes that benchmarks start: functions of a module that run in a process of their own, programs that are ended
when they hang, and the memory of a process.

`python -m benchmarks.processes MODULE:FUNCTION ARGUMENTS` calls a function with the arguments in a JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_S = 60.0  # that a process may take until its first result


def command(function: Callable[..., Any] | str, **arguments: Any) -> list[str]:
    """Return the command line of a process that calls `function` with the keyword arguments.

    function: a module's function, or "module:name". arguments: values that JSON can represent.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__name__}"
    return [sys.executable, "-m", "benchmarks.processes", name, json.dumps(arguments)]


def watch(
    command: list[str],
    log: Path,
    grows: Path,
    seconds: float,
    stall_s: float,
    each: Callable[[], Any],
    **variables: str,
) -> int | str:
    """Run a command in the repository's root; return its exit status, or "hung" or "cut" if it was killed.

    It is hung if the file `grows` has not changed for `stall_s` seconds (START_S more until the first change), and cut
    after `seconds`. At the end all processes of its session are killed. log: file to which the output is appended.
    each: called after every change of `grows`. variables: of the environment.
    """
    with log.open("ab") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            begun = time.monotonic()
            changed = begun + START_S
            seen = _stamp(grows)
            while (status := process.poll()) is None:
                time.sleep(0.1)
                now = time.monotonic()
                if (stamp := _stamp(grows)) != seen:
                    seen, changed = stamp, now
                    each()
                if now - begun > seconds:
                    return "cut"
                if now - changed > stall_s:
                    return "hung"
            return status
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _stamp(path: Path) -> tuple[int, int]:
    """Return (modification time in ns, size in bytes) of a file; (0, 0) if it does not exist."""
    if not path.exists():
        return 0, 0
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def memory(pid: int | str = "self", kind: str = "VmRSS") -> int:
    """Return the bytes of a line of /proc/PID/status, `kind`; 0 if the process has ended or there is no such line."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0)


def unused_bytes(array: Any) -> int:
    """Return the bytes of an array on a CPU for which the system has not given memory yet, after `give_back_zeros`:
    those of its `whole_pages` that mincore does not report. Pages for which mincore fails do not count.
    """
    import numpy as np

    from jaxengine.runner.base.memory import whole_pages  # imports jax, which most processes here need not

    found = 0
    for first, size in whole_pages(array):
        given = np.zeros(size // mmap.PAGESIZE, np.uint8)
        pointers = ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_void_p(given.ctypes.data)
        if ctypes.CDLL(None).mincore(*pointers) == 0:
            found += int((given & 1 == 0).sum()) * mmap.PAGESIZE
    return found


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
