"""Reads the parts of a record that a replay needs, and checks them before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.records.folder import ENGINE_FILE, find_step, read_about
from jaxengine.records.step_file import RecordedStep, RecordError
from jaxengine.replay.compare import TOLERANCES

_MAX = 2**31 - 1
# Required fields of parts of engine.json: the upper limit of a number, 0 for a text.
_NEEDED = {
    "options": {"tensor_parallel_size": 1024, "data_parallel_size": 1024, "dtype": 0},
    "model": {"architecture": 0, "layers": _MAX, "hidden_size": _MAX, "vocab_size": _MAX, "digest": 0},
}


def read_engine(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `engine.json`. Raises RecordError if it cannot be read (`read_about`), or if a
    value that a replay needs is missing or invalid.
    """
    about = read_about(folder)
    for part, needed in _NEEDED.items():
        for name, most in needed.items():
            value = about[part].get(name)
            if most and (type(value) is not int or not 1 <= value <= most):
                raise _wrong(folder, f"{part}.{name}", value, f"1 to {most}")
            if not most and not isinstance(value, str):
                raise _wrong(folder, f"{part}.{name}", value, "a text")
    if (dtype := about["options"]["dtype"]) not in TOLERANCES:
        raise _wrong(folder, "options.dtype", dtype, ", ".join(TOLERANCES))
    for index, entry in enumerate(about["weights"]):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("checksums"), Mapping):
            raise _wrong(folder, f"weights[{index}]", entry, "an object with the object checksums")
    return about


def read_recorded(folder: Path, number: int | None) -> RecordedStep:
    """Read the step `number` of a folder, None for the last one. Raises RecordError for one that is missing, cannot be
    read, or lacks its number, the index of its weights (from 0 on) or its bucket.
    """
    step = find_step(folder, number)
    about = step.about if isinstance(step.about, Mapping) else {}
    bucket = about.get("bucket")
    is_bucket = isinstance(bucket, list) and [type(each) for each in bucket] == [int, int, int, list]
    is_numbered = all(type(about.get(name)) is int and about[name] >= 0 for name in ("step", "weights"))
    if not is_numbered or not is_bucket:
        raise RecordError(f"step {number if number is not None else 'last'} of {folder} does not say what it ran")
    return step


def _wrong(folder: Path, name: str, value: Any, allowed: str) -> RecordError:
    """Return a RecordError, which the caller raises, about an invalid value in engine.json; the value is cut to 40
    characters.
    """
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return RecordError(f"{folder / ENGINE_FILE}: {name} is {shown}; allowed: {allowed}")
