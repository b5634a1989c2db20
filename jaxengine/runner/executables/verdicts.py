"""Verdicts on kernels, kept in the folder of executables: a JSON file for each environment.

A note with the name of a call is written before its proof begins. If the process ends in the middle, the next start
finds the note. One note does not fail a kernel, since the end may have had another reason; a proof that takes long gets
a second one.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.runner.executables.executable_files import ExecutableFiles

_PREFIX, _SUFFIX = "kernel-proof-", ".xla"  # files with this suffix are deleted when no start has used them for a month
_LATE = "late "  # before a process's name, in the place of a boot id: its process then counts as ended
_PARTS = "verdicts", "running", "engines"


class Verdicts:
    """Verdicts on kernel calls in one environment, by the text of a call, in a file.

    Several processes may use the file at once: each change reads it anew. A change of one process may overwrite that of
    another, which then judges again.
    """

    def __init__(self, directory: str | None, environment: Sequence[str]):
        """Open the folder of executables. directory, and the ConfigError that is raised: see `ExecutableFiles`.
        environment: facts on which verdicts depend, the first a digest of sources.
        """
        self._files = ExecutableFiles(directory)
        self._about = list(environment[1:7])  # the rest is long, or lists flags
        self._name = f"{_PREFIX}{hashlib.sha256(repr(environment).encode()).hexdigest()[:32]}{_SUFFIX}"
        self._lock = threading.Lock()
        self._here: dict[str, Any] | None = None  # content after this process's last change

    def known(self) -> dict[str, dict[str, Any]]:
        """Return the fields of each verdict, by the text of its call."""
        return self._read()["verdicts"]

    def calls_of(self, engine: str) -> list[str] | None:
        """Return the calls that were stored for an engine with this digest, if all of them have verdicts; else None."""
        found = self._read()
        calls = found["engines"].get(engine)
        return None if calls is None or any(call not in found["verdicts"] for call in calls) else calls

    def unfinished(self) -> list[str]:
        """Return the call of each note by this process or by one that has ended, without calls that have a verdict. A
        call occurs as often as it has notes.
        """
        found = self._read()
        notes = [(process, call) for process, call in found["running"].items() if call not in found["verdicts"]]
        return [call for process, call in notes if process == _own() or not _lives(process)]

    def begin(self, call: str) -> None:
        """Store a note that this process begins the proof of a call, in place of its earlier note."""
        self._change(lambda found: found["running"].update({_own(): call}))

    def takes_long(self, call: str) -> None:
        """Store a second note of a call whose proof this process has begun."""
        self._change(lambda found: found["running"].update({f"{_LATE}{_own()}": call}))

    def end(self, call: str, verdict: Mapping[str, Any]) -> None:
        """Store a verdict's fields for a call, and delete all notes of that call."""

        def change(found: dict[str, Any]) -> None:
            found["verdicts"][call] = dict(verdict)
            found["running"] = {process: each for process, each in found["running"].items() if each != call}

        self._change(change)

    def forget(self, call: str) -> None:
        """Delete all notes of a call."""

        def change(found: dict[str, Any]) -> None:
            found["running"] = {process: each for process, each in found["running"].items() if each != call}

        self._change(change)

    def engine(self, engine: str, calls: Sequence[str]) -> None:
        """Store the calls that an engine with this digest makes."""
        self._change(lambda found: found["engines"].update({engine: list(calls)}))

    def _change(self, change: Any) -> None:
        """Read the content, call `change(content)`, which modifies it in place, and write it. Thread-safe. If it cannot
        be written, this process goes on with the changed content.
        """
        with self._lock:
            found = self._read()
            change(found)
            self._here = found
            content = {"environment": self._about, **found}
            self._files.write(self._name, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; if it is missing or damaged, the content after this process's last change, or
        empty parts.
        """
        return _parsed(self._files.read(self._name)) or self._here or {part: {} for part in _PARTS}


def all_verdicts(directory: str | None) -> list[dict[str, Any]]:
    """Return the content of every file of verdicts in the folder of executables, sorted by file name; damaged files are
    left out. Raises ConfigError for a folder that ExecutableFiles refuses.
    """
    files = ExecutableFiles(directory)
    return [found for name in files.names(_PREFIX) if (found := _parsed(files.read(name))) is not None]


def _parsed(content: bytes | None) -> dict[str, Any] | None:
    """Return the content of a file of verdicts; None if `content` is None, no JSON, or lacks a part."""
    try:
        found = json.loads(content or b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in _PARTS) else None


def _own() -> str:
    """Return the name of this process: boot id of the host, process id and start time, separated by spaces."""
    return f"{_boot()} {os.getpid()} {_started(os.getpid())}"


def _lives(process: str) -> bool:
    """Whether the process that `_own` named still runs; processes of another host or boot do not count as running."""
    boot, pid, started = process.rsplit(" ", 2)
    return boot == _boot() and _started(int(pid)) == started


def _boot() -> str:
    """Return the id of this boot of the host; "unknown" on a system without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """Return when a process was started, in clock ticks since the host's boot, as text; "-" if there is no such
    process, or no /proc.
    """
    try:
        # The process's name, which comes second and in parentheses, may contain any characters.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "-"
