"""Formats a check: the table, the failures as sentences, and a summary per target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxengine.check.targets import find_target
from jaxengine.results import table as plain_table

MIB = 2**20


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a text table, one line per program. "-" marks figures that the device or program does not have."""
    return plain_table([_line(row) for row in rows])


def _line(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's columns in the table, by name in order; None for a figure that it does not have.

    They are the target, program and result, then memory, registers, launches, copies, collectives, cycles, operations,
    rows of experts, bytes moved and exchanged, the roofline, and the time and size of compilation.

    Memory is in MiB or KiB, operations are in billions, shares in percent. Only steps have figures of device memory.
    """
    return {
        "target": row["target"],
        "program": row["program"],
        "result": "FAIL" if row["failures"] else "ok",
        "peak MiB": _scaled(row, "peak_bytes", MIB) if row["step"] else None,
        "% HBM": _percent(row, "hbm_bytes") if row["step"] else None,
        "% plan": _percent(row, "planned_bytes") if row["step"] else None,
        "temp % weights": _of_codes(row),
        "VMEM/SMEM KiB": _scaled(row, "fast_bytes", 1024),
        "regs": row.get("registers"),
        "spills": row.get("spill_bytes"),
        "launches": row.get("launches"),
        "of a layer": row.get("layer_launches"),
        "copies": len(row["copies"]) if "copies" in row else None,
        "collectives": sum(row["collectives"].values()) if "collectives" in row else None,
        "cycles": row.get("cycles"),
        "Gop": _scaled({"done": sum(row["operations"].values())}, "done", 10**9) if row.get("operations") else None,
        "rows x": row["experts"]["multiplied"] if row.get("experts") else None,
        "moved MiB": _scaled(row, "moved_bytes", MIB),
        "exchanged MiB": _scaled(row, "exchanged_bytes", MIB) if row.get("exchanged_bytes") else None,
        "roofline us": row.get("roofline_us"),
        "compile s": row.get("compile_s"),
        "size MiB": _scaled(row, "serialized_bytes", MIB),
    }


def _scaled(row: dict[str, Any], name: str, unit: int) -> float | None:
    """Return a figure of a row in units of `unit`; None if the row lacks it."""
    return None if row.get(name) is None else row[name] / unit


def _percent(row: dict[str, Any], of: str) -> float | None:
    """Return the peak bytes in percent of the row's figure `of`; None if the row lacks either or that figure is 0."""
    return 100 * row["peak_bytes"] / row[of] if row.get(of) and "peak_bytes" in row else None


def _of_codes(row: dict[str, Any]) -> float | None:
    """Return a forward pass's temporaries in percent of all weight bytes; None unless it has quantised weights."""
    needs = row.get("needs", {})
    return 100 * row["workspace_bytes"] / needs["weight_bytes"] if needs.get("quantized_bytes") else None


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return all failures of the rows, each prefixed with target and program."""
    return [f"{row['target']}, {row['program']}: {reason}" for row in rows for reason in row["failures"]]


def summary(rows: Sequence[dict[str, Any]], seconds: dict[str, float]) -> str:
    """Return lines of text: for each target the number of programs, of failed ones, memory and seconds, for a CPU that
    machine code is left out, then its memory plans.

    rows: results of `Compiler.row`. seconds: total time of each target by name; rows of other targets are left out.
    """
    lines = []
    for target, wall in seconds.items():
        own = [row for row in rows if row["target"] == target]
        compiling = sum(row.get("compile_s", 0.0) for row in own)
        failed = sum(bool(row["failures"]) for row in own)
        held = sum(row.get("held_bytes", 0) for row in own if row["step"]) / MIB
        lines.append(
            f"{target}: {len(own)} programs, {failed} failed, steps and epilogues hold {held:,.0f} MiB; "
            f"{compiling:.0f} s compiling, {wall:.0f} s in all"
        )
        if find_target(target).backend == "cpu":
            lines.append(f"{target}: compiled in plain XLA, without the machine code of a start with jaxengine[cpu]")
        lines += [_plan(target, row["plan"]) for row in own if "plan" in row]
    return "\n".join(lines)


def _plan(target: str, plan: dict[str, Any]) -> str:
    """Return one line of text that describes the memory plan of a target's devices. plan: result of
    Compiler._plan_row.
    """
    parts = ", ".join(
        f"{name.replace('_', ' ')} {plan[name] / MIB:,.0f}" for name in ("weights", "kv_pages", "workspace")
    )
    return (
        f"{target}: {plan['layers']} layers in {plan['total'] / MIB:,.0f} MiB of a device: {parts}; "
        f"{plan['num_requests']:,.1f} requests of {plan['max_model_len']:,} tokens at once, "
        f"{plan['ranks']} times"
    )
