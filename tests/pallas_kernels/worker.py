"""Runs checks in processes of their own, because an interpreted kernel with a fault can wait for ever.

    python -m tests.pallas_kernels.worker [--mutant kernel:name]

A worker reads one job per line from stdin, a JSON list [check, implementation, *arguments], and answers each with a
JSON line: null if it passed, else what is wrong. `Worker` is the other end: it kills a worker that fails or takes too
long, and starts a fresh one for the next job.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.fast_compile import fast_compile_environment, share_contexts

Job = tuple  # (check, implementation, *arguments), every entry a string or a number

ROOT = Path(__file__).parents[2]
IDLE_SECONDS = 40.0  # without processor time, after which threads wait for each other for ever


class Worker:
    """One process at a time; `options` are the command line of this module."""

    def __init__(self, *options: str) -> None:
        self._command = [sys.executable, "-m", "tests.pallas_kernels.worker", *options]
        self._process: subprocess.Popen | None = None
        self._implementation: str | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker

    def run(self, job: Job, seconds: float) -> str | None:
        """None if the job passes, else why not; one that takes `seconds` of processor time, or none for a while, hangs.

        Not seconds of the clock: a machine with other work to do must not make a hanging kernel of a slow one.
        """
        if job[1] != self._implementation:  # what one prepares must not reach another
            self.close()
        if self._process is None:
            self._process, self._implementation = self._started(), job[1]
        answer = self._answer(job, seconds)
        if answer is not None:
            self.close()
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen:
        # NPROC: threads of XLA's pool. Every interpreted thread that waits at a barrier may hold one of them, so that
        # with as many as there are cores the one they wait for may never run.
        environment = os.environ | fast_compile_environment()
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "NPROC": "16"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._errors, cwd=ROOT, env=environment, bufsize=0
        )

    def _answer(self, job: Job, seconds: float) -> str | None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._errors.truncate(0)
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        used, line = Used(self._process.pid), b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in line:
                if not selector.select(1.0):
                    if (why := used.up(seconds)) is not None:
                        return f"{why}, it hangs: {self._stacks()}"
                    continue
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    return f"the process ended: {self._last_errors()}"
                line += part
        return json.loads(line.partition(b"\n")[0])

    def _stacks(self) -> str:
        """Where the threads of a process that hangs are."""
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return self._last_errors()

    def _last_errors(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(size - 6000, 0))
        return self._errors.read().decode(errors="replace")


class Used:
    """Processor time of a process since now."""

    def __init__(self, pid: int) -> None:
        self._pid, self._start, self._begin = pid, self._seconds(pid), time.monotonic()
        self.moved, self.last = self._begin, self._start

    def up(self, seconds: float) -> str | None:
        """Why the process has had its time, None if it has not."""
        now, used = time.monotonic(), self._seconds(self._pid)
        if used is None or self.last is None or self._start is None:  # no /proc here
            return f"no answer after {seconds:.0f} s" if now - self._begin > seconds else None
        if used - self.last > 0.1 or self._is_runnable():
            self.moved, self.last = now, used
        if used - self._start > seconds:
            return f"no answer after {seconds:.0f} s of processor time"
        return f"no progress for {IDLE_SECONDS} s" if now - self.moved > IDLE_SECONDS else None

    def _is_runnable(self) -> bool:
        """Whether a thread wants a core and has none: others have them all."""
        states = []
        for thread in Path(f"/proc/{self._pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # ended meanwhile
                states.append(thread.read_text().rpartition(")")[2].split()[0])
        return "R" in states

    @staticmethod
    def _seconds(pid: int) -> float | None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


def run_all(groups: Sequence[Sequence[Job]], seconds: float, workers: int = 2) -> dict[Job, Future]:
    """Run groups of jobs side by side, the jobs of a group one after another in one process: they share programs.

    A process goes on with groups of its implementation while there are any, for another one costs seconds to start;
    then some take the first group that is left, some the last.
    Returns at once; the future of a job has what `Worker.run` returns.
    """
    outcomes: dict[Job, Future] = {job: Future() for group in groups for job in group}
    waiting = list(groups)
    lock = threading.Lock()

    def work(place: int) -> None:
        worker, own = Worker(), ""
        try:
            while True:
                with lock:
                    if not waiting:
                        return
                    group = next((each for each in waiting if each[0][1] == own), waiting[place])
                    waiting.remove(group)
                own = group[0][1]
                for job in group:
                    outcomes[job].set_result(worker.run(job, seconds))
        finally:
            worker.close()

    for number in range(workers):
        threading.Thread(target=work, args=(-(number % 2),), daemon=True).start()
    return outcomes


def serve(answers: int) -> None:
    """Run jobs from stdin until it ends, answering on the file descriptor."""
    from tests.pallas_kernels import faster_interpreters
    from tests.pallas_kernels.checks import CHECKS
    from tests.pallas_kernels.implementations import IMPLEMENTATIONS

    # As in tests/conftest.py: traces make objects by the hundred thousand, which collections would visit in vain.
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    share_contexts(pytest.MonkeyPatch())
    failing = threading.Lock()  # several threads of a kernel may fail at once: one of them answers

    def fail(error: Exception) -> None:
        failing.acquire()
        os.write(answers, json.dumps("".join(traceback.format_exception(error, limit=-6))).encode() + b"\n")
        os._exit(1)

    faster_interpreters.on_error(fail)
    started = None
    for line in sys.stdin:
        check, name, *arguments = json.loads(line)
        implementation = IMPLEMENTATIONS[name]
        if started != name:
            assert started is None, f"a process that has started {started} cannot run {name}"
            implementation.start()
            started = name
        answer = outcome(CHECKS[check], *arguments, implementation)
        os.write(answers, json.dumps(answer).encode() + b"\n")


def outcome(check: Callable[..., None], *arguments: object) -> str | None:
    """None if a check passes, else its error."""
    try:
        check(*arguments)
    except AssertionError as error:
        return str(error) or traceback.format_exc(limit=-3)
    except Exception:  # whatever a kernel raises is a failure of its case, not of the worker
        return traceback.format_exc(limit=-6)
    return None


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what jax prints about races must not mix with the answers
    if sys.argv[1:2] == ["--mutant"]:
        from tests.pallas_kernels.mutations import plant

        plant(sys.argv[2])
    serve(answers)
