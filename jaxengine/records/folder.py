"""The folder to which an engine records steps: `engine.json`, which describes the engine, and a file for each of the
last steps.

The oldest files are deleted to make room. Each file is written completely or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.records.step_file import (
    FORMAT,
    RecordedStep,
    RecordError,
    num_bytes,
    read_step,
    write_step,
    write_whole,
)

ENGINE_FILE, LOCK_FILE = "engine.json", "engine.lock"
# Fields of `engine.json` besides its format, with their types: those of jaxengine.runner.recorded_engine and "weights".
_FIELDS = {"versions": dict, "platform": str, "device": str, "options": dict, "model": dict, "weights": list}
_STEP = re.compile(r"step-(\d{8,})\.safetensors")
# Names of the files that `write_whole` leaves behind if the process is killed.
_UNFINISHED = re.compile(r"\.(step-\d{8,}\.safetensors|engine\.json)\.tmp")


class StepFolder:
    """A folder to which one engine records steps. Only its owner may read it, as it holds what users sent.

    Attributes:
      path: the folder.
      num_recorded: number of steps written since the engine started.
      num_too_large: number of steps that were left out because they are too large.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], max_steps: int, max_bytes: int):
        """Open the folder for recording, or create it.

        Raises OSError; and RecordError for a folder to which an engine is recording now, one with steps of another
        engine, or one with other files. Nothing in such a folder is changed.

        Args:
          path: the folder.
          about: description of the engine that runs the steps, of plain JSON values. A folder that is not empty must
            have been recorded by an engine with the same description.
          max_steps: number of steps to keep.
          max_bytes: limit of their sizes together.
        """
        self.path, self._max_steps, self._max_bytes = path, max_steps, max_bytes
        self.num_recorded = self.num_too_large = 0
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _has_others(path):
            read_about(path)
        # A finalizer closes it, too, because an engine may be dropped without being shut down.
        self._unlock = weakref.finalize(self, os.close, _locked(path))
        try:
            self._about = _continued(path, {"format": FORMAT, **about, "weights": []})
            _tidy(path)
            self._sizes = {number: file.stat().st_size for number, file in step_files(path).items()}
            self._next = max(self._sizes, default=-1) + 1
            self._write_about()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder's lock, so that another engine can record to it. A second call does nothing."""
        self._unlock()

    def weights(self, version: Any, checksums: Mapping[str, str]) -> int:
        """Return the index, in the list of `engine.json`, of the weights that the next steps use. If they are not in it
        yet, append them and rewrite the file.

        version: version of the weights. checksums: their checksums by weight name. Raises OSError if the file cannot be
        written.
        """
        entry = {"version": version, "checksums": dict(checksums)}
        if entry not in self._about["weights"]:
            self._about["weights"].append(entry)
            self._write_about()
        return self._about["weights"].index(entry)

    def write(self, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int | None:
        """Delete the oldest steps as the limits of steps and bytes require, write a new one, count it in `num_recorded`
        and return its number. If the arrays alone exceed the limit of bytes, count the step in `num_too_large`, change
        no file and return None.

        about: description of the step, plain JSON values; "step", its number, is added in the file. Raises OSError, and
        KeyError for a dtype that step_file.py does not list. Then no step was added, but old ones may have been
        deleted.
        """
        size = num_bytes(arrays)
        if size > self._max_bytes:
            self.num_too_large += 1
            return None
        while self._sizes and (
            len(self._sizes) >= self._max_steps or sum(self._sizes.values()) + size > self._max_bytes
        ):
            oldest = min(self._sizes)
            (self.path / _name(oldest)).unlink(missing_ok=True)
            del self._sizes[oldest]
        number = self._next
        self._sizes[number] = write_step(self.path / _name(number), {"step": number, **about}, arrays)
        self._next += 1
        self.num_recorded += 1
        return number

    def _write_about(self) -> None:
        """Write the description to `engine.json`, in place of an earlier file. Raises OSError if that fails."""
        write_whole(self.path / ENGINE_FILE, iter([json.dumps(self._about, indent=1).encode()]))


def step_files(folder: Path) -> dict[int, Path]:
    """Return the files of a folder's steps by step number, ascending; {} for a folder that cannot be read."""
    found = {}
    with contextlib.suppress(OSError):
        found = {int(match[1]): file for file in folder.iterdir() if (match := _STEP.fullmatch(file.name))}
    return dict(sorted(found.items()))


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `engine.json`.

    Raises RecordError if it is missing, unreadable or of another format, or if a field of _FIELDS is missing or has
    another type.
    """
    path = folder / ENGINE_FILE
    if not path.is_file():
        raise RecordError(f"{folder} has no {ENGINE_FILE}: it was not written by record_steps")
    try:
        about = json.loads(path.read_text("utf-8"))
        version = about["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read ({error})") from None
    if missing := [name for name in _FIELDS if name not in about]:
        raise RecordError(f"{path} lacks {', '.join(missing)}")
    if version != FORMAT:
        raise RecordError(f"{path} has format {version!r}; this version of jaxengine reads {FORMAT}")
    if wrong := [name for name, kind in _FIELDS.items() if not isinstance(about[name], kind)]:
        kinds = ", ".join(f"{name} is not of type {_FIELDS[name].__name__}" for name in wrong)
        raise RecordError(f"{path} is broken: {kinds}")
    return about


def find_step(folder: Path, number: int | None) -> RecordedStep:
    """Return the step `number` of a folder; the last one for None.

    Raises RecordError if the file is invalid (`read_step`), or if there is no such step.
    """
    files = step_files(folder)
    if not files:
        raise RecordError(f"{folder} has no recorded step")
    if number is None:
        number = max(files)
    if number not in files:
        raise RecordError(f"{folder} has no step {number}; it has {_ranges(list(files))}")
    return read_step(files[number])


def _has_others(folder: Path) -> bool:
    """Return whether a folder has files other than the lock file and unfinished ones, which may exist before
    `engine.json` does.
    """
    return any(file.name != LOCK_FILE and not _UNFINISHED.fullmatch(file.name) for file in folder.iterdir())


def _locked(folder: Path) -> int:
    """Lock a folder without waiting; return the lock file's descriptor, which holds the lock until it is closed. The
    lock file is created if it is missing, and stays.

    Raises RecordError if another engine holds the lock, and OSError.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise RecordError(f"an engine that runs now records to {folder}; name a new folder") from None
        raise
    return descriptor


def _continued(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return `about` with the weights that the folder's `engine.json` lists; `about` itself for a folder that is empty
    or has nothing but the lock file and unfinished files.

    Raises RecordError if `engine.json` describes another engine, is missing or cannot be read (`read_about`).
    """
    if not _has_others(folder):
        return about
    found = read_about(folder)
    weights = found.pop("weights")
    expected = json.loads(json.dumps({name: value for name, value in about.items() if name != "weights"}))
    if differing := _differing(found, expected):
        raise RecordError(f"{folder} has steps of another engine ({', '.join(differing)} differ); name a new folder")
    return {**about, "weights": weights}


def _tidy(folder: Path) -> None:
    """Make a folder accessible to its owner only, and delete unfinished files of a process that was killed.

    A folder whose mode this user may not change keeps it. Raises OSError for other problems.
    """
    # A folder of another user, who lets this one write, cannot be changed. The files are private in any case.
    with contextlib.suppress(PermissionError):
        os.chmod(folder, 0o700)
    for file in folder.iterdir():
        if _UNFINISHED.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _name(number: int) -> str:
    """Return the file name of the step `number`, which has at least eight digits."""
    return f"step-{number:08}.safetensors"


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text in which runs are joined: "3 to 7, 9" for 3, 4, 5, 6, 7 and 9."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join(" to ".join(map(str, span)) for span in spans)


def _differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names, sorted, of the fields in which two descriptions differ, those that only one of them has
    included.
    """
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
