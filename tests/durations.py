"""Seconds that each test file takes, recorded, and compared with a later run.

`tests/durations.json` has a run of all tests; `make durations` records another. A run's own seconds lie in
`.cache/durations.json`. A machine's speed cancels out: a run is compared after division by the median of its files'
ratios to the record.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

RECORD = Path(__file__).with_name("durations.json")
NUM_SHOWN = 10
# A file's growth below this is noise: seconds, and a share of what is recorded.
MIN_SECONDS, MIN_SHARE = 1.0, 0.25


class Durations:
    """Adds up what pytest reports of set-ups, calls and tear-downs, by file."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, nodeid: str, seconds: float) -> None:
        self.seconds[nodeid.partition("::")[0]] += seconds

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rounded = {name: round(seconds, 1) for name, seconds in sorted(self.seconds.items())}
        path.write_text(json.dumps(rounded, indent=0) + "\n")


def recorded() -> dict[str, float]:
    """Seconds by file of the recorded run."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def growth(run: Mapping[str, float], record: Mapping[str, float]) -> list[tuple[float, str]]:
    """(seconds more than recorded, file) of files that grew, the most first; a file without a record grew from nothing.

    Seconds are those of the recorded run's machine.
    """
    ratios = [seconds / record[name] for name, seconds in run.items() if record.get(name, 0) >= MIN_SECONDS]
    speed = statistics.median(ratios) if ratios else 1.0
    found = []
    for name, seconds in run.items():
        before = record.get(name, 0.0)
        more = seconds / speed - before
        if more >= max(MIN_SECONDS, MIN_SHARE * before):
            found.append((more, name))
    return sorted(found, reverse=True)
