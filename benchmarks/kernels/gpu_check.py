"""What `scripts/gpu_check` runs: conformance on the device, attention, torch's attentions, the engine; one JSON file.

Each section is a process of its own with its share of the budget, in order of value. A section whose results do not
grow for a while hangs: it is ended and started again, and goes on behind the row it hung in. Run again with the same
folder, everything goes on where it was cut. Imports no jax: a device serves one process at a time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Option, shared
from benchmarks.recorder import Recorder

ROOT = RESULTS.parents[1]
# Section -> share of the time that is left when it begins.
SECTIONS = {"conformance": 0.35, "attention": 0.55, "torch": 0.3, "engine": 1.0}
BENCHMARKS = {
    "attention": ("attention",),
    "torch": ("attention", "--of", "flashinfer", "sdpa", "flex"),
    "engine": ("engine_gpu",),
}
# Seconds without a new row after which a section hangs: the longest compile is well below.
STALL_S = 240.0
# What `conformance` runs; "device" is the name of the compiled kernels in the suite's own table.
CONFORMANCE = ["tests/pallas_kernels", "-k", "device"]
OPTIONS = {
    "only": Option(None, "one section", choices=tuple(SECTIONS)),
    "out": Option(str(RESULTS), "folder of the results"),
    **shared(budget_s=7200.0, tiny=False),
}


def run(args: Namespace, recorder: Recorder) -> None:
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.budget_s
    for section, share in SECTIONS.items():
        if args.only not in (None, section):
            continue
        left = deadline - time.monotonic()
        seconds = left if args.only else left * share
        print(f"\n=== {section}, {seconds:.0f} s", flush=True)
        if section == "conformance":
            result = conformance(folder, seconds, args.platform, args.tiny)
        else:
            result = benchmark(section, folder, seconds, args.platform, args.tiny)
        merge(folder, section, result)
        recorder.add({"section": section, "kept": result["ok"], "ended": result["ended"]})
    print(f"\n{folder / 'gpu_check.json'}")


def conformance(folder: Path, seconds: float, platform: str | None, tiny: bool) -> dict[str, Any]:
    """The suite's tests of the device's own kernels, stopped when the time is over; what failed is listed."""
    # Without an accelerator the suite's row of compiled kernels is "cpu".
    selection = (
        ["tests/pallas_kernels/attention/test_paged_attention.py", "-k", "cpu and block"] if tiny else CONFORMANCE
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=short", *selection]
    log = folder / "gpu_check_conformance.log"
    ended = execute(command, log, seconds, platform)
    text = log.read_text()
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)\b", text[-2000:])
    }
    failures = re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.M)
    ok = ended == 0 and counts.get("passed", 0) > 0
    print("\n".join(text.splitlines()[-25:]), flush=True)
    return {"ok": ok, "ended": "cut" if ended is None else ended, "log": log.name, **counts, "failures": failures[:200]}


def benchmark(section: str, folder: Path, seconds: float, platform: str | None, tiny: bool) -> dict[str, Any]:
    """Runs a benchmark module until it ends or its time is over; restarts it when it hangs or crashes in a row."""
    out, deadline = folder / f"gpu_check_{section}.json", time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        command = [sys.executable, "-m", "benchmarks", *BENCHMARKS[section], "--save", str(out)]
        command += ["--budget-s", f"{left:.0f}"]
        command += ["--tiny"] * tiny
        command += ["--platform", platform] if platform and section != "torch" else []
        before = rows(out)
        ended = execute(command, None, left, platform, watch=out)
        found = rows(out)
        if ended == 0 or deadline - time.monotonic() < 10 or len(found) <= len(before):
            break
        print(f"{section} ended with {ended}; it is started again behind its last row", flush=True)
    bad = [name for name, row in found.items() if "status" in row]
    print("\n".join(f"not measured to the end: {name}" for name in bad), flush=True)
    return {"ok": bool(found) and not bad, "ended": "cut" if ended is None else ended, "rows": found}


def rows(path: Path) -> dict[str, Any]:
    """The rows of a benchmark's file by name."""
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: {key: value for key, value in row.items() if key != "name"} for row in found}


def execute(
    command: list[str], log: Path | None, seconds: float, platform: str | None, *, watch: Path | None = None
) -> int | None:
    """The exit status of a command run in the root; None when it was ended for taking too long or for hanging."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if platform:
        environment["JAX_PLATFORMS"] = platform
    start = time.monotonic()
    with open(log or os.devnull, "w") as file:
        output: Any = file if log else None
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while True:
            try:
                return process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                grown = watch.stat().st_mtime if watch and watch.exists() else 0.0
                stalled = watch is not None and now - start > STALL_S and time.time() - grown > STALL_S
                if now - start > seconds or stalled:
                    process.kill()
                    process.wait()
                    print(f"{' '.join(command[2:4])} ended: {'no new row' if stalled else 'no time left'}", flush=True)
                    return None


def merge(folder: Path, section: str, result: dict[str, Any]) -> None:
    """Puts a section into the one file a person reads."""
    path = folder / "gpu_check.json"
    whole = json.loads(path.read_text()) if path.exists() else {}
    part = folder / f"gpu_check_{section}.json"
    if part.exists():
        whole["machine"] = {**whole.get("machine", {}), **json.loads(part.read_text())["machine"]}
    whole[section] = result
    path.write_text(json.dumps(whole, indent=1) + "\n")
