"""The conformance tests of the device's kernels, one process for each kernel, for `scripts/gpu_check`.

A kernel is a test function of the suite; its cases are the parameters with which the function runs. A kernel that hangs
or ends its process is reported with the case in which it did; the others continue, and it gets another turn after that
case. This module is also a plugin of pytest, which writes a line for every case that begins or ends. It needs pytest
and none of its plugins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, START_S, watch
from benchmarks.recorder import Recorder, Row

# No plugin is needed. The project's options that only plugins know would end pytest without them, for its `addopts`
# has --strict-config.
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST = ["-m", "pytest", "-c", "pyproject.toml", "-o", "addopts=--import-mode=importlib", "--disable-warnings"]
PYTEST += ["-p", "no:cacheprovider", "-q"]
FOLDER = "tests/pallas_kernels/"
# The suite's table calls compiled kernels "device", and those without an accelerator "cpu".
DEVICE, TINY = (FOLDER, "-k", "device"), (f"{FOLDER}attention/test_paged_attention.py", "-k", "cpu and block")
# Of the first turn: a process takes a part of it to start. A later one is longer than a hang, which it names.
LEAST_S = 30.0
MAX_ENDED = 3  # processes of one kernel


def pytest_addoption(parser):
    """Add --case-lines to pytest's options. It is a hook of pytest."""
    parser.addoption("--case-lines", help="file that gets a line of JSON for each case that begins or ends")


def pytest_configure(config):
    """Register the plugin that writes the file of --case-lines, if that option is given. It is a hook of pytest."""
    if config.getoption("--case-lines"):
        config.pluginmanager.register(_Lines(Path(config.getoption("--case-lines"))))


class _Lines:
    """Pytest plugin that appends a line of JSON, [case, outcome, message], to a file when a case begins and ends.

    outcome: "begun", then pytest's "passed", "failed" or "skipped"; a failure after the test adds one more line.
    message: why a case failed, at most 500 characters; else empty.
    """

    def __init__(self, path: Path):
        self.path = path

    def _write(self, *line: str) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self._write(nodeid, "begun", "")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") if report.failed else ""
            self._write(report.nodeid, report.outcome, message[:500])


def run(
    path: Path, seconds: float, stall_s: float, selection: Sequence[str], each: Callable[[], None], **variables: str
) -> str:
    """Run the selected cases, each kernel in its own processes and for a share of the time.

    Returns "failed" if a case failed or hung or a process crashed, else "cut" if cases are left, else "complete". The
    rows in the file `path` are up to date after every case; rows that it already has are continued. A kernel is given
    up after MAX_ENDED hangs and crashes.

    seconds: of all kernels together. stall_s: seconds without a line after which a case counts as hung. selection:
    arguments of pytest. each: called after every update of the rows. variables: of the processes' environment.
    """
    deadline = time.monotonic() + seconds
    recorder = Recorder("conformance", path)
    recorder.resume()
    kernels, errors = collect(selection, seconds, **variables)
    recorder.rows = [_row(name, cases, recorder.named(name)) for name, cases in kernels.items()]
    recorder.rows += [{**_row(error, [], None), "ended": ["collection"]} for error in errors]
    recorder.write()
    while todo := [row for row in recorder.rows if row["done"] < row["cases"] and len(row["ended"]) < MAX_ENDED]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        row = min(todo, key=lambda row: row["turns"])
        turn_s = min(left, max(stall_s + START_S if row["turns"] else LEAST_S, left / len(todo)))
        _turn(recorder, row, kernels[row["name"]][row["done"] :], turn_s, stall_s, each, **variables)
    if any(row["failed"] or row["ended"] for row in recorder.rows):
        return "failed"
    return "cut" if todo else "complete"


def collect(selection: Sequence[str], seconds: float, **variables: str) -> tuple[dict[str, list[str]], list[str]]:
    """Have pytest collect the selected cases; return (cases by kernel, in order; lines that say what could not be
    collected).

    A pytest that takes more than `seconds` or fails without output gives such a line. variables: of pytest's
    environment.
    """
    command = [sys.executable, *PYTEST, "--collect-only", *selection]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **PLAIN, **variables}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}, [f"pytest collected for more than {seconds:.0f} s"]
    lines, kernels = done.stdout.splitlines(), dict[str, list[str]]()
    for case in lines:
        if "::" in case and not case.startswith("ERROR"):
            kernels.setdefault(case.partition("[")[0].removeprefix(FOLDER), []).append(case)
    errors = [line for line in lines if line.startswith("ERROR ")]
    if not (kernels or errors):
        errors = [f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}"]
    return kernels, errors


def _row(name: str, cases: list[str], before: Row | None) -> Row:
    """Return the row `before` if it has the same number of cases, else a new row with all counts 0."""
    if before and before.get("cases") == len(cases):
        return before
    counts: Row = {"cases": len(cases), "done": 0, "passed": 0, "skipped": 0, "turns": 0}
    return {"name": name, **counts, "failed": [], "ended": []}


def _turn(
    recorder: Recorder,
    row: Row,
    cases: list[str],
    seconds: float,
    stall_s: float,
    each: Callable[[], Any],
    **variables: str,
) -> None:
    """Run cases of one kernel in a separate process for at most `seconds`; update the kernel's row and print its
    counts.

    stall_s: seconds without progress after which a case counts as hung. each: called after every update of the row.
    variables: of the process's environment.
    """
    assert recorder.path
    before, lines = {**row, "turns": row["turns"] + 1}, recorder.path.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    command = [sys.executable, *PYTEST, "-p", __name__, "--case-lines", str(lines), *cases]

    def update(ended: int | str = "cut") -> Row:
        now = recorder.add(_counted(before, cases, _outcomes(lines), ended, stall_s), ("name",), quiet=True)
        each()
        return now

    log = recorder.path.with_suffix(".log")
    now = update(watch(command, log, lines, seconds, stall_s, update, **PLAIN, **variables))
    print("{name}: {done} of {cases} cases, {passed} passed, {skipped} skipped".format_map(now), flush=True)
    print("".join(f"  {word}\n" for word in (*now["failed"], *now["ended"])), end="", flush=True)
    lines.unlink(missing_ok=True)


def _outcomes(lines: Path) -> dict[str, tuple[str, str]]:
    """Return (outcome, message) of each case that has begun, by case, from the file `lines`; the last outcome of a case
    counts.

    Ignores an incomplete last line. Returns an empty dict if there is no file.
    """
    whole = lines.read_text().rpartition("\n")[0].splitlines() if lines.exists() else []
    return {case: (outcome, message) for case, outcome, message in map(json.loads, whole)}


def _counted(
    before: Row, cases: list[str], outcomes: dict[str, tuple[str, str]], ended: int | str, stall_s: float
) -> Row:
    """Return the row `before` a turn with the outcomes of the turn added.

    ended: how the process ended: its exit status, "hung", or "cut" if it was stopped or still runs. Unless it was cut,
    the case in which it hung or died counts as done, and "ended" names it.
    """
    over = {case: outcome for case, outcome in outcomes.items() if outcome[0] != "begun"}
    kinds = [outcome for outcome, _ in over.values()]
    failed = [f"{case}: {message}" for case, (outcome, message) in over.items() if outcome == "failed"]
    row = {
        **before,
        "done": before["done"] + len(over),
        **{kind: before[kind] + kinds.count(kind) for kind in ("passed", "skipped")},
        "failed": before["failed"] + failed,
    }
    if ended != "cut" and len(over) < len(cases):
        begun = [case for case in outcomes if case not in over]
        how = f"hung for {stall_s:.0f} s" if ended == "hung" else f"its process ended with {ended}"
        row["ended"] = [*before["ended"], f"{begun[-1] if begun else 'before a case'}: {how}"]
        row["done"] += bool(begun)
    return row
