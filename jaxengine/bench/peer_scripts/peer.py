"""The protocol between `jaxengine bench peers` and the engine it measures, one JSON object a line.

The script's argument is the job: {"gguf": path, "variant": name, "threads": n, "folder": for converted weights,
"options": more of the engine's own, which not every script reads}.
Its first line says it is ready: {"version": text, "load_seconds": s}. Then each line in is a workload:
{"prompts": [[id, ...], ...], "max_tokens": n, "prefix": tokens all prompts share, "share_prefix": whether the engine
may compute that prefix once}, and each line out what it took: {"seconds": s, "output_tokens": n, "first_token_seconds":
mean or null, "peak_rss": bytes that the process held at most so far, files that it maps among them, or null}, or
{"skipped": why}. Nothing may be remembered from one workload to the next. Standard library only: it runs in the
interpreter of the engine measured.
"""

from __future__ import annotations

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
    """Runs the protocol; `load(job)` gives the engine's version and the function that runs one workload."""
    # What the engine prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    start = time.perf_counter()
    version, run = load(job)
    print(json.dumps({"version": version, "load_seconds": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        done = run(json.loads(line))
        done["peak_rss"] = _peak_rss()
        print(json.dumps(done), file=answers, flush=True)


def _peak_rss() -> int | None:
    """None where nobody tells: what getrusage has began with the process that started this one."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
