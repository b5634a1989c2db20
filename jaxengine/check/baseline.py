"""What a check found kept in a file, and what got worse since.

Compared is what the compiler decides and repeats exactly. Compile seconds depend on the machine and are only recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.config.engine_config import ConfigError

# A figure may grow by this much.
SLACK = 0.05
FIGURES = (
    "peak_bytes",
    "workspace_bytes",
    "code_bytes",
    "serialized_bytes",
    "fast_bytes",
    "registers",
    "spill_bytes",
    "cycles",
    "bundles",
)


def save(path: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows and what they were made with."""
    from jaxengine.bench.report import write_json

    write_json(path, {"settings": settings, "rows": list(rows)})


def load(path: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a baseline.

    Raises:
      ConfigError: it is no baseline, or one of another model or other options.
    """
    try:
        content = json.loads(Path(path).read_text())
        rows, made_with = content["rows"], content["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("against", path, f"a file that --save wrote ({type(error).__name__}: {error})") from None
    for name, value in settings.items():
        if made_with.get(name) != value:
            raise ConfigError(
                "against", path, f"a baseline with {name} {value!r}; this one has {made_with.get(name)!r}"
            )
    return rows


def compare(rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> None:
    """Adds to each row's failures the figures that are more than SLACK worse than the baseline's."""
    before = {(row["target"], row["program"]): row for row in baseline}
    for row in rows:
        old = before.get((row["target"], row["program"]))
        if old is None or "error" in row:
            continue
        for name in FIGURES:
            was, now = old.get(name), row.get(name)
            if was is not None and now is not None and now > was * (1 + SLACK):
                worse = f" (+{100 * (now / was - 1):.0f} %)" if was else ""
                row["failures"].append(f"{name} was {was:,} in the baseline and is {now:,}{worse}")


def missing(rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]], targets: Sequence[str]) -> list[str]:
    """Programs of these targets that the baseline has and this check does not."""
    checked = {(row["target"], row["program"]) for row in rows}
    wanted = [(row["target"], row["program"]) for row in baseline if row["target"] in targets]
    return [
        f"{target}, {program}: in the baseline, not checked"
        for target, program in wanted
        if (target, program) not in checked
    ]
