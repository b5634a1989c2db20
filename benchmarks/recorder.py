"""A benchmark's rows: printed as they come, and written to a file that is whole after every row.

The file has one form: the benchmark's name, the command, when it began, the machine, and `rows`, a list of objects.
Rows measured by name can be resumed: a run that was cut goes on where it stopped, and a row in which a process hung or
was killed is reported as such and not tried again. Knows nothing of what is measured.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxengine.results import machine as host
from jaxengine.results import record, table

Row = dict[str, Any]
BEGUN = "begun"


class Recorder:
    """Rows of one run of a benchmark.

    Attributes:
      path: of the file; None writes none.
      rows: rows added so far, in order.
      notes: further entries of the file, in addition to the rows.
      deadline: `time.monotonic()` after which `measure` begins no further row.
      describe: returns a description of the machine on which the rows are measured.
      failed: whether a row's `kept` is False.
    """

    def __init__(
        self,
        benchmark: str,
        path: Path | None = None,
        command: str = "",
        budget_s: float = float("inf"),
        describe: Callable[[], dict[str, Any]] = host,
    ):
        """Begin a run without rows.

        path: of the file; None writes none. command: command line, for the file. budget_s: seconds until `deadline`.
        """
        self.path, self.rows, self.notes = path, list[Row](), dict[str, Any]()
        self.deadline = time.monotonic() + budget_s
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self._about = {"benchmark": benchmark, "command": command, "when": when}
        self.describe, self._machine = describe, None

    @property
    def failed(self) -> bool:
        """Whether a row says that a limit was not kept."""
        return any(row.get("kept") is False for row in self.rows)

    @property
    def machine(self) -> dict[str, Any]:
        """Description of the machine, from `describe`. That is called at the first use only, because it may start a
        device.
        """
        if self._machine is None:
            self._machine = self.describe()
        return self._machine

    def add(self, row: Row, key: tuple[str, ...] = (), *, quiet: bool = False) -> Row:
        """Append a row, or replace the first row with the same values in the columns `key`; write the file and return
        the row.

        key: columns; () always appends. The row is printed unless `quiet`.
        """
        same = [at for at, each in enumerate(self.rows) if key and all(each.get(name) == row[name] for name in key)]
        if same:
            self.rows[same[0]] = row
        else:
            self.rows.append(row)
        self.write()
        if not quiet:
            print(_line(row), flush=True)
        return row

    def take_over(self) -> None:
        """Replace the rows by those in the file, whichever machine they are from; by none without a file."""
        self.rows = self._read().get("rows", [])

    def resume(self) -> None:
        """Begin with the rows in the file if it is from the same machine and versions, else without rows; write the
        file.

        A row that had begun but not ended gets a status that says so.
        """
        before = self._read()
        if before.get("machine") == self.machine:
            self.rows = before["rows"]
        for row in self.rows:
            if row.get("status") == BEGUN:
                row["status"] = "the process ended in it"
        self.write()

    def named(self, name: str) -> Row | None:
        """Return the first row with this name; None if there is none."""
        return next((row for row in self.rows if row.get("name") == name), None)

    def measure(self, name: str, function: Callable[[], Row]) -> Row | None:
        """Return the row `name`: an existing one, else the result of `function`, which is added; None if no time is
        left.

        While `function` runs, the file has the row with the status BEGUN. An Exception becomes the row's `error`, of at
        most 500 characters.
        """
        if (found := self.named(name)) is not None:
            return found
        if time.monotonic() > self.deadline:
            return None
        self.add({"name": name, "status": BEGUN}, quiet=True)
        try:
            row = function()
        except Exception as error:  # one implementation's failure is a result, the others are still measured
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        return self.add({"name": name, **row}, ("name",))

    def finish(self) -> None:
        """Write the file. Before that, print a table if there are several rows that have the same columns and plain
        values.
        """
        flat = all(not isinstance(value, dict | list) for row in self.rows for value in row.values())
        if len(self.rows) > 1 and flat and len({tuple(row) for row in self.rows}) == 1:
            print("\n" + table(self.rows))
        self.write()

    def write(self) -> None:
        """Replace the file atomically by one with the current rows and notes; do nothing without a path."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, {**self._about, "machine": self.machine, **self.notes, "rows": self.rows})

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; {} without one."""
        return json.loads(self.path.read_text()) if self.path and self.path.exists() else {}


def write(path: Path, whole: dict[str, Any]) -> None:
    """Replace a file atomically with `whole` as JSON."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(whole, indent=1) + "\n")
    os.replace(part, path)


def _line(row: Row) -> str:
    """Return a row as a line of text, or as several lines if it has lists or dicts."""
    if any(isinstance(value, dict | list) for value in row.values()):
        return record({key: str(value)[:300] for key, value in row.items()}) + "\n"
    first = [row["name"].ljust(58)] if "name" in row else []
    return "  ".join([*first, *(f"{key} {value}" for key, value in row.items() if key != "name")])
