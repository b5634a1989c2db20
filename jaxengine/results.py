"""Results of measurements: a table for people, JSON for programs, with a description of the machine."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a table with the first row's keys as columns; numbers are right-aligned.

    A value that is None or missing is "-". Without rows the text is empty.
    """
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    numeric = [all(not isinstance(row.get(name), str) for row in rows) for name in names]

    def line(texts: Sequence[str]) -> str:
        shown = zip(texts, widths, numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in shown).rstrip()

    return "\n".join([line(names), "  ".join("-" * width for width in widths), *(line(texts) for texts in cells)])


def record(values: dict[str, Any]) -> str:
    """Format values one per line, with names aligned."""
    width = max(map(len, values), default=0)
    return "\n".join(f"{name.ljust(width)}  {_cell(value)}" for name, value in values.items())


def _cell(value: Any) -> str:
    """Return a value as text: "-" for None, floats with three digits, or one decimal from 10 on."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of `values`, which must not be empty, by nearest rank.

    It is the smallest of the values such that at least a fraction `share` (0 to 1) of them are less than or equal to
    it.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]


def machine() -> dict[str, Any]:
    """Return a description of this machine for JSON results.

    The keys are "cpu" (name of the processor), "cores", "python", "jaxengine", "jax", "jaxlib" and "numpy" (versions).
    """
    from importlib.metadata import version
    from os import cpu_count

    from jaxengine.version import __version__

    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else ""
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": cpu_count(),
        "python": platform.python_version(),
        "jaxengine": __version__,
        **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
    }


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write `result` as JSON to the file `path`, in place of an earlier one, and add this machine's description as
    "machine".

    Does nothing if `path` is None or "". Raises OSError if the file cannot be written.
    """
    if path:
        Path(path).write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")
