"""Processes that benchmarks start: functions of a module that run in one of their own, and the memory that one holds.

`python -m benchmarks.processes MODULE:FUNCTION ARGUMENTS` calls a function with an object of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def command(function: Callable[..., Any] | str, **arguments: Any) -> list[str]:
    """The command line of a process that calls `function` (or "module:name"); arguments must survive JSON."""
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__name__}"
    return [sys.executable, "-m", "benchmarks.processes", name, json.dumps(arguments)]


def memory(pid: int | str = "self", kind: str = "VmRSS") -> int:
    """Bytes that Linux says a process holds (`kind`: a line of /proc/PID/status); 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0)


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(**json.loads(sys.argv[2]))
