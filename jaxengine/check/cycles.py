"""Estimated cycles and instruction bundles of TPU kernels, from libtpu's own static profile.

libtpu's estimate walks the final instruction bundles with the trip counts it can see: it knows no HBM bandwidth, and a
loop whose trip count is data counts as about one pass. So it is an alarm for a kernel's compute schedule, to be
compared with itself, with a roofline beside it. The profile aborts the process for copies its model does not know;
bundle counts still come then, from a second process without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxengine.check.hlo import Module, custom_calls

LLO, PROFILE = "llo", "profile"
_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")
_CYCLES = re.compile(r"estimated_cycles: (\d+)")

# (programs to run, libtpu's flags, folder of its dumps) -> rows of the programs
Run = Callable[[Sequence[str], bool], list[dict[str, Any]]]


def libtpu_flags(dumps: Path, *, profile: bool) -> str:
    """LIBTPU_INIT_ARGS that make the compiler leave what `read` reads."""
    flags = (
        f"--xla_jf_dump_to={dumps / LLO} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    return f"{flags} --xla_jf_dump_static_llo_profile_to={dumps / PROFILE}" if profile else flags


def read(dumps: Path, module: Module) -> dict[str, int]:
    """{"bundles", "cycles"} of all Mosaic kernels of the program compiled last; what is not known is not in it."""
    kernels = [call.name for call in custom_calls(module) if 'custom_call_target="tpu_custom_call"' in call.rest]
    found = {}
    for name, folder, suffix, pattern in (
        ("bundles", LLO, "-schedule-analysis_final_bundles.txt", _BUNDLES),
        ("cycles", PROFILE, "", _CYCLES),
    ):
        counts = [_first(dumps / folder, f"*{kernel}*{suffix}", pattern) for kernel in kernels]
        if counts and None not in counts:
            found[name] = sum(count for count in counts if count is not None)
    return found


def _first(folder: Path, glob: str, pattern: re.Pattern[str]) -> int | None:
    for path in sorted(folder.glob(glob)):
        if match := pattern.search(path.read_text(errors="replace")):
            return int(match[1])
    return None


def add_cycles(rows: Sequence[dict[str, Any]], run: Run) -> None:
    """Puts "cycles" and "bundles" into the rows of kernels that compile.

    run: compiles the programs named, with or without libtpu's profile, and returns their rows; those of programs that
      took their process with them have an "error".
    """
    wanted = {row["program"]: row for row in rows if not row["step"] and "error" not in row}
    for profile in (True, False):
        names = [name for name, row in wanted.items() if "bundles" not in row]
        for found in run(names, profile) if names else ():
            row = wanted.get(found["program"])
            if row is not None:
                row.update({name: found[name] for name in ("cycles", "bundles") if name in found})
