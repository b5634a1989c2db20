"""The protocol between `jaxengine bench peers` and the engine it measures, one JSON object a line.

The script's argument is the job: {"gguf": path, "variant": name, "threads": n, "folder": for converted weights,
"options": further engine options, which some scripts ignore}. Its first line reports readiness: {"version": text,
"load_seconds": s}. Each input line is then a workload: {"prompts": [[id, ...], ...], "max_tokens": n, "prefix": number
of tokens that all prompts share, "share_prefix": whether the engine may compute that prefix once}. Each output line is
its result: {"seconds": s, "output_tokens": n, "first_token_seconds": mean or null, "peak_rss": peak resident bytes of
the process, mapped files included, or null}, or {"skipped": reason}. Nothing may be cached between workloads. Standard
library only, as it runs in the interpreter of the measured engine.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Workload = dict[str, Any]
Measured = dict[str, Any]


def serve(load: Callable[[dict[str, Any]], tuple[str, Callable[[Workload], Measured]]]) -> None:
    """Load an engine, then run workloads from standard input until its end, by the protocol of this module.

    The job is the script's argument. Results go to standard output; what the engine prints goes to standard error.
    load: takes the job; returns the engine's version, and a function that runs one workload and returns its result
    without "peak_rss". Errors of `load` and of a run end the process.
    """
    # What the engine prints goes to stderr, so that it does not mix with the results.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the process is killed in the end, and its buffer lost
    job = json.loads(sys.argv[1])
    start = time.perf_counter()
    version, run = load(job)
    print(json.dumps({"version": version, "load_seconds": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        done = run(json.loads(line))
        done["peak_rss"] = _peak_rss()
        print(json.dumps(done), file=answers, flush=True)


def _peak_rss() -> int | None:
    """Return the peak resident bytes of this process, None without /proc.

    The value of getrusage would include the parent process.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
