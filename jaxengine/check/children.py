"""Starts a compiling process for each target and collects its replies.

A process that dies fails only the program that it was compiling: its successor skips that program and continues.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxengine.check.compiled.cycles import libtpu_flags, per_block
from jaxengine.check.targets import Target
from jaxengine.paths import HOME

Progress = Callable[[str, int, int, str], None]

_TAIL = 400
_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process aborts on libtpu's lock file
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """Description of what a check compiles on every target.

    Attributes:
      cycles: also profile the blocks of TPU kernels.
      model, options, kernels, short, only: see jaxengine.check.compile.CompileRequest.
    """

    model: str
    options: dict[str, Any]
    kernels: str | None
    short: bool
    cycles: bool
    only: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a check.

    Attributes:
      target: the target that was checked.
      rows: figures of its programs.
      too_small: errors of the smaller targets that were refused, by their names.
    """

    target: Target
    rows: list[dict[str, Any]]
    too_small: dict[str, str]


def check_smallest(places: Sequence[tuple[Target, dict[str, Any]]], job: Job, progress: Progress) -> Found:
    """Check targets in order until one is not too small for the model; return the last result and the errors before it.

    The result's `too_small` holds the error of each smaller target by name; if all are too small, the rows are those of
    the last one, with its error. places: (target, engine options that replace the job's), at least one. progress: see
    `check_target`.
    """
    too_small: dict[str, str] = {}
    for target, options in places:
        rows = check_target(target, dataclasses.replace(job, options=options), progress)
        refused = next((row for row in rows if row.get("too_small")), None)
        if refused is None or target is places[-1][0]:
            return Found(target, rows, too_small)
        too_small[target.name] = refused["error"]
    raise AssertionError("no places")


def check_target(target: Target, job: Job, progress: Progress) -> list[dict[str, Any]]:
    """Compile the job's programs for a target in another process, wait for it, and return the programs' rows of
    figures.

    progress: called with (name of the target, programs done, programs in total or 0 if unknown, name of the program)
    before each is compiled. For a TPU with `job.cycles`, a second process profiles the blocks of kernels, whose rows
    come last; not if there is no memory plan or the target has no profile. What fails to compile, and a model that the
    target refuses, are rows with "error". Raises ValueError or BrokenPipeError if the process breaks the protocol (see
    `replies`).
    """
    rows, known = _run(target, job, progress)
    if target.backend == "tpu" and job.cycles and known and not target.no_profile:
        blocks, _ = _run(target, job, progress, known=known, profile=True)
        rows += per_block(blocks)
    return rows


def _run(
    target: Target,
    job: Job,
    progress: Progress,
    *,
    known: dict[str, Any] | None = None,
    profile: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Compile all programs of a target, or with `profile` the blocks of its kernels; return (rows, memory plan).

    known: memory plan of an earlier call; None to make one. The returned plan is empty if there is none. A model that
    is refused, such as one that is too large for the target, has a row with "error" and "too_small". If the process
    dies, the program that it was compiling gets a row with an error, and another process continues after it; without a
    plan, or if it died between programs, nothing continues. progress: see `check_target`.
    """
    rows: list[dict[str, Any]] = []
    skip: list[str] = []
    known = dict(known or {})
    total = 0
    fields = {name: value for name, value in dataclasses.asdict(job).items() if name != "cycles"}
    with tempfile.TemporaryDirectory(prefix="jaxengine-check-") as folder:
        log, dumps = Path(folder) / "log", Path(folder) / "dumps"
        dumps.mkdir()
        variables = environment(target, dumps, profile)
        while True:
            request = {"target": target.name, **fields, **known, "skip": skip, "log": str(log), "dumps": str(dumps)}
            request["profile"] = profile
            current, code = None, 0
            for message in replies(request, variables, log):
                event = message["event"]
                if event == "exit":
                    code = message["code"]
                elif event == "refused":
                    failed = _failed(target, "memory plan", message["reason"])
                    return [*rows, failed | {"too_small": message["too_small"]}], {}
                elif event == "plan":
                    known = {name: message[name] for name in ("num_pages", "planned_bytes", "planned_held")}
                elif event == "programs":
                    total = total or len(message["names"])
                elif event == "start":
                    current = message["name"]
                    progress(target.name, len(rows), total, current)
                else:
                    rows.append(message["row"])
                    skip.append(message["row"]["program"])
                    current = None
            if code == 0:
                return rows, known
            reason = f"the compiler's process ended with status {code}: {tail(log)}"
            rows.append(_failed(target, current or "start", reason))
            if current is None or not known:
                return rows, known
            skip.append(current)


def environment(target: Target, dumps: Path, profile: bool) -> dict[str, str]:
    """Return this process's environment variables with those added that let a target's compiler run without the device:
    XLA_FLAGS and PYTHONPATH are extended, others replaced.

    dumps: folder for the compiler's dumps. profile: have the compiler write cycle estimates.
    """
    ours = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ours["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [os.environ.get("PYTHONPATH")])])
    if target.backend == "tpu":
        ours |= _TPU
        ours["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dumps} --xla_dump_hlo_as_text=true"
        if profile:
            ours["LIBTPU_INIT_ARGS"] = libtpu_flags(dumps)
    elif target.backend == "cpu" and target.num_devices > 1:
        devices = f"--xla_force_host_platform_device_count={target.num_devices}"
        ours["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    elif target.backend == "cuda":
        ours |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_HOST_LLVM": "1"}
    return {**os.environ, **ours}


def prepare_libtpu() -> None:
    """Set environment variables with which libtpu, which must not be loaded yet, compiles in this process without a
    TPU.
    """
    os.environ.update(_TPU)


def _failed(target: Target, program: str, reason: str) -> dict[str, Any]:
    """Return the row of a program that failed with `reason`, which is its "error" and its only failure."""
    return {"target": target.name, "program": program, "step": False, "error": reason, "failures": [reason]}


def replies(
    request: dict[str, Any], variables: dict[str, str], log: Path, module: str = "jaxengine.check.compile"
) -> Iterator[dict[str, Any]]:
    """Start a compiling process and yield its messages, then {"event": "exit", "code": its exit status}.

    request: sent as JSON, by default the fields of compile.CompileRequest. variables: the process's environment. log:
    file for its standard error, which is overwritten. module: what the process runs. The process is killed when the
    iterator is closed. Raises ValueError for a line that is not JSON, BrokenPipeError if the process ends before it has
    read the request.
    """
    command = [sys.executable, "-m", module]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=variables, text=True
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        with process.stdin as stdin:
            json.dump(request, stdin)
        for line in process.stdout:
            yield json.loads(line)
        yield {"event": "exit", "code": process.wait()}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def tail(log: Path) -> str:
    """Return the last _TAIL characters of a compiler's log, with all white space as single spaces. Raises OSError if
    there is no log.
    """
    return " ".join(log.read_text(errors="replace").split())[-_TAIL:]
