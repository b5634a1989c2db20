"""When a row of a check is a failure: limits of the chip, memory plan, copies, exchanges nobody accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxengine.check.targets import Target

# Peak memory of the largest step against the plan that was made for it.
TOLERANCE = 0.02
MIB = 2**20


def failures(row: dict[str, Any], target: Target, planned: int, *, is_largest: bool) -> list[str]:
    """What is wrong with a row, as sentences.

    Args:
      planned: bytes of weights, pool and workspace that the memory plan foresees on one device.
      is_largest: the step the workspace was planned for, whose peak must meet the plan and not only stay below it.
    """
    if "error" in row:
        return [f"does not compile: {row['error']}"]
    found = []
    peak = row["peak_bytes"]
    if target.hbm_bytes and peak > target.hbm_bytes:
        found.append(f"needs {peak / MIB:,.0f} MiB of {target.hbm_bytes / MIB:,.0f} MiB")
    if row["step"]:
        if peak > planned * (1 + TOLERANCE):
            found.append(f"peak {peak / MIB:,.0f} MiB is above the {planned / MIB:,.0f} MiB planned")
        if is_largest and peak < planned * (1 - TOLERANCE):
            found.append(f"peak {peak / MIB:,.0f} MiB is below the {planned / MIB:,.0f} MiB planned: memory lies idle")
    if row.get("fast_bytes") and row["fast_bytes"] > target.fast_bytes:
        found.append(f"a kernel reserves {row['fast_bytes']:,} bytes of {target.fast_bytes:,} on the chip")
    found.extend(f"copies {copy}" for copy in row["copies"])
    if row["collectives"] and target.num_devices == 1:
        found.append(f"talks to other devices although there is one: {row['collectives']}")
    found.extend(f"exchanges: {text}" for text in row["wrong_exchanges"])
    return found


def overfull(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The stages whose programs, all of which stay loaded, hold more than the memory plan foresaw; as sentences."""
    found = []
    steps = [row for row in rows if row["step"] and "held_bytes" in row]
    for target, stage in dict.fromkeys((row["target"], row["stage"]) for row in steps):
        own = [row for row in steps if (row["target"], row["stage"]) == (target, stage)]
        held, planned = sum(row["held_bytes"] for row in own), own[0]["planned_held"]
        if held > planned:
            found.append(
                f"{target}, stage {stage}: {len(own)} programs hold {held / MIB:,.1f} MiB, {planned / MIB:,.1f} planned"
            )
    return found
