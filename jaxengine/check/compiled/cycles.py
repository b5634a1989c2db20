"""Estimated cycles of TPU kernels, from libtpu's static profile.

libtpu's estimate walks the final instruction bundles with the known trip counts. It does not know HBM bandwidth, gives
up on copies of data-dependent length, and counts a loop of unknown trip count as about one pass. So the cost of a block
of keys is the difference of kernels with one and with several. The figure detects regressions of a kernel's compute
schedule when compared with itself (`--against`); it is not an absolute time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.check.compiled.hlo import Module, custom_calls

PROFILE = "profile"
# Repetitions of a block in the two programs whose difference is taken.
TRIPS = (1, 9)
# Sizes to which the cycles of blocks are scaled, so that kernels with different block sizes can be compared.
TOKENS, KEYS = 128, 1024
_CYCLES = re.compile(r"estimated_cycles: (\d+)")


def libtpu_flags(dumps: Path) -> str:
    """Return the value of LIBTPU_INIT_ARGS with which the compiler writes its static profile into `dumps`, for
    `read`.
    """
    return f"--xla_jf_dump_static_llo_profile_to={dumps / PROFILE}"


def read(dumps: Path, module: Module) -> int | None:
    """Return the sum of the cycles that libtpu estimates for the Mosaic kernels of the program compiled last.

    dumps: the folder given to `libtpu_flags`. module: that program. Returns None if it has no kernel, or a kernel has
    no estimate.
    """
    kernels = [call.name for call in custom_calls(module) if 'custom_call_target="tpu_custom_call"' in call.rest]
    counts = [_first(dumps / PROFILE, f"*{kernel}*") for kernel in kernels]
    return sum(count or 0 for count in counts) if counts and None not in counts else None


def _first(folder: Path, glob: str) -> int | None:
    """Return the cycles in the first file of a folder, by name, that matches `glob` and states any; None if no file
    does.
    """
    for path in sorted(folder.glob(glob)):
        if match := _CYCLES.search(path.read_text(errors="replace")):
            return int(match[1])
    return None


def per_block(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reduce the rows of block programs to one row per kind of block, with the cycles for KEYS keys and one token (or
    TOKENS tokens of a run).

    The keys of such a row are "target", "step", "failures", "compile_s", "program" (the kind), "block" ("tokens" and
    "keys" of a block) and, if libtpu reports them, "cycles", rounded. rows: results of Compiler.row, two per kind, with
    TRIPS repetitions. Rows without a block, such as those of programs that failed, come first and unchanged. A kind
    with only one of the two programs gets no row; one without cycles gets a row with a failure.
    """
    kinds: dict[str, dict[int, dict[str, Any]]] = {}
    found = [row for row in rows if "block" not in row]
    for row in rows:
        if "block" in row:
            kinds.setdefault(row["block"]["name"], {})[row["block"]["trips"]] = row
    for name, by_trips in kinds.items():
        few, many = (by_trips.get(trips) for trips in TRIPS)
        if few is None or many is None:
            continue
        block = many["block"]
        tokens = 1 if block["tokens"] == 1 else block["tokens"] / TOKENS
        kept = {key: many[key] for key in ("target", "step", "failures", "compile_s")}
        row = {**kept, "program": name, "block": {key: block[key] for key in ("tokens", "keys")}}
        if many.get("cycles") is None or few.get("cycles") is None:
            row["failures"] = [*row["failures"], "libtpu reports no cycles"]
        else:
            each = (many["cycles"] - few["cycles"]) / (TRIPS[1] - TRIPS[0])
            row["cycles"] = round(each * KEYS / block["keys"] / tokens)
        found.append(row)
    return found
