"""Stores the figures of a check in a file, the baseline, and compares later checks with it.

Only figures that the compiler determines, and reproduces exactly, are compared. Compile seconds depend on the machine
and are only recorded. Of programs for this machine's CPU only exchanges and operations are compared.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxengine.check.targets import find_target
from jaxengine.config.engine_config import ConfigError

# Allowed relative growth of a figure.
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
    "moved_bytes",
    "exchanged_bytes",
)
# Figures compared for programs of this machine's CPU.
CPU_FIGURES = ("exchanged_bytes",)


def save(path: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, the settings and the compiler versions to the file `path`, as JSON. Raises OSError if it cannot
    be written.

    settings: model and options of the check. rows: figures of each program, as `Compiler.row` returns them.
    """
    from jaxengine.results import write_json

    write_json(path, {"settings": settings, "compilers": compilers(), "rows": list(rows)})


def compilers() -> dict[str, str]:
    """Return the versions of the installed compiler packages, by package."""
    found = {}
    for name in ("jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def other_compilers(path: str) -> str:
    """Return a text on how the installed compilers differ from those of the baseline in the file `path`; "" if they
    agree.

    A compiler that is not installed here is not compared; one that the baseline lacks differs. Raises OSError if the
    file cannot be read, ValueError if it is not JSON.
    """
    then, now = json.loads(Path(path).read_text()).get("compilers", {}), compilers()
    differing = [f"{name} {now[name]} (then {then.get(name)})" for name in now if now[name] != then.get(name)]
    return f"other compilers than the baseline's: {', '.join(differing)}" if differing else ""


def load(path: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the baseline in the file `path`.

    settings: model and options of this check, which must equal the baseline's. Raises ConfigError if the file is not a
    baseline, or has another model or other options.
    """
    try:
        content = json.loads(Path(path).read_text())
        rows, made_with = content["rows"], dict(content["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("against", path, f"a file that --save wrote ({type(error).__name__}: {error})") from None
    for name, value in settings.items():
        if made_with.get(name) != value:
            raise ConfigError(
                "against", path, f"a baseline with {name} {value!r}; this one has {made_with.get(name)!r}"
            )
    return rows


def compare(rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> None:
    """Append to each row's "failures", in place, a text for each figure, one of FIGURES or for a CPU of CPU_FIGURES,
    that exceeds the baseline's by more than SLACK.

    Rows that the baseline does not have, and rows of programs that did not compile, are left unchanged. Figures that
    either side lacks are not compared, but operations of an element type that only the row has are compared with 0.
    """
    before = {(row["target"], row["program"]): row for row in baseline}
    for row in rows:
        old = before.get((row["target"], row["program"]))
        if old is None or "error" in row:
            continue
        names = CPU_FIGURES if find_target(row["target"]).backend == "cpu" else FIGURES
        figures = [(name, old.get(name), row.get(name)) for name in names]
        if (done := old.get("operations")) is not None:
            counted = row.get("operations", {}).items()
            figures += [(f"operations in {name}", done.get(name, 0), count) for name, count in counted]
        for name, was, now in figures:
            if was is not None and now is not None and now > was * (1 + SLACK):
                worse = f" (+{100 * (now / was - 1):.0f} %)" if was else ""
                row["failures"].append(f"{name} was {was:,} in the baseline and is {now:,}{worse}")


def missing(rows: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]], targets: Sequence[str]) -> list[str]:
    """Return a sentence for each program of the named targets that is in the baseline but was not checked."""
    checked = {(row["target"], row["program"]) for row in rows}
    wanted = [(row["target"], row["program"]) for row in baseline if row["target"] in targets]
    return [
        f"{target}, {program}: in the baseline, not checked"
        for target, program in wanted
        if (target, program) not in checked
    ]
