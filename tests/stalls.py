"""Run tests on a machine that stands still now and then: which of them rest on its speed?

    python -m tests.stalls [--seed N] [--longest SECONDS] [--apart SECONDS] -- PYTEST_ARGUMENTS

Stops the processes of a pytest run for a moment, again and again: all at once, as a busy host does to a virtual
machine, or one of them, as a scheduler does. A test that fails here and passes otherwise has a deadline, a sleep or a
rounded duration that a slow machine breaks. Linux only; the exit status is pytest's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def running_below(root: int) -> list[int]:
    """Processes that descend from `root` and are not stopped: what a test has stopped itself stays so."""
    parents, states = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # pid (name) state parent ...; a name may hold anything.
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            pid = int(status.parent.name)
            parents[pid], states[pid] = int(parent), state
    found, rest = [], [root]
    while rest:
        parent = rest.pop()
        children = [pid for pid, above in parents.items() if above == parent]
        found += [pid for pid in children if states[pid] not in "TZ"]
        rest += children
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=3.0, help="seconds that processes are stopped at most")
    parser.add_argument("--apart", type=float, default=3.0, help="seconds that they run in between at most")
    parser.add_argument("pytest", nargs="+", help="arguments of pytest, after --")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    run = subprocess.Popen([sys.executable, "-m", "pytest", *args.pytest])
    while run.poll() is None:
        time.sleep(draw.uniform(0.2, args.apart))
        chosen = running_below(run.pid)
        if draw.random() < 0.5:
            chosen = draw.sample(chosen, min(1, len(chosen)))
        send(chosen, signal.SIGSTOP)
        try:
            time.sleep(draw.uniform(0.1, args.longest))
        finally:
            send(chosen, signal.SIGCONT)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
