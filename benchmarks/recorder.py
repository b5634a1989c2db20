"""A benchmark's results as a JSON file that is whole after every row, so that a run may be cut anywhere and resumed.

A row is marked as begun before it is measured. One that never ended (a kernel that hangs, a process that was killed) is
reported as such and not tried again. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGUN = "begun"


class Recorder:
    """Rows by name in one file, with the machine that made them.

    Attributes:
      deadline: `time.monotonic()` after which no further row is begun.
    """

    def __init__(self, path: Path | str, machine: dict[str, Any], budget_s: float = float("inf")):
        """Takes over the rows of a file of the same machine and versions; any other file is replaced."""
        self.path = Path(path)
        self.deadline = time.monotonic() + budget_s
        self.rows: dict[str, dict[str, Any]] = {}
        self._machine = machine
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            before = json.loads(self.path.read_text())
            if before.get("machine") == machine:
                self.rows = before["rows"]
        for row in self.rows.values():
            if row.get("status") == BEGUN:
                row["status"] = "the process ended in it"
        self._write()

    def measure(self, name: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The row `name`: as it was recorded before, or what `function` gives; None when there is no time for it.

        An exception becomes the row's `error`.
        """
        if name in self.rows:
            return self.rows[name]
        if time.monotonic() > self.deadline:
            return None
        self.rows[name] = {"status": BEGUN}
        self._write()
        try:
            row = function()
        except Exception as error:  # one implementation's failure is a result, the others are still measured
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        self.rows[name] = row
        self._write()
        print(name.ljust(58), "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        return row

    def _write(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps({"machine": self._machine, "rows": self.rows}, indent=1) + "\n")
        os.replace(part, self.path)
