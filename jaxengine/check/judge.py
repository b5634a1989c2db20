"""Decides when a row of a check is a failure: limits of the chip, the memory plan, copies, unexpected exchanges, and
more operations or bytes than the model's own count (jaxengine.check.model.roofline) explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxengine.check.targets import Target

# Bytes of HLO element types that may be wider than a model's dtype.
WIDTHS = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}

# Allowed relative difference between the largest step's peak memory and its plan.
TOLERANCE = 0.02
# Allowed excess of operations: only products and attention multiply matrices.
OPERATIONS_SLACK = 1.1
# Least rows per expert for the check: kernels pad fewer rows to multiples of eight.
EXPERT_ROWS = 64
# Share of a step's operations that may have a wider type than the model's.
WIDE_SHARE = 0.02
# Weights are read once, and dominate steps of few rows. Inputs and outputs of products are also read and written by the
# operations between products, in float32 too; XLA:GPU also writes the partial sums of products that it splits, at most
# sixteen.
WEIGHTS_SLACK = 1.1
ROWS_SLACK = {"tpu": 3, "cuda": 24, "cpu": 12}
# If states fit on the chip, XLA:TPU moves all of a layer there and back, including snapshots and unused slots.
STATES_SLACK = 1.5
# Limit of temporaries, without inputs and outputs of products, as a share of the codes: no layer's matrices are
# dequantised as a whole.
WIDENED_SHARE = 1 / 8
# Limit of temporaries of latent attention, as a share of its query and for small ones in bytes: it copies neither its
# query nor its result.
LATENT_SHARE = 1 / 2
LATENT_BYTES = 64 << 20
# Tables, messages and the state of slots.
SMALL_BYTES = 8 << 20
MIB = 2**20


def failures(row: dict[str, Any], target: Target, planned: int, *, is_largest: bool) -> list[str]:
    """Return a sentence for everything that is wrong with a row; [] if nothing is. A row with "error" has only that
    sentence.

    Args:
      row: figures of a program, as `Compiler.row` of jaxengine.check.compile collects them.
      planned: bytes of weights, pool and workspace that the memory plan grants on one device; 0 without a plan.
      is_largest: whether the row is the step for which the workspace was planned; its peak must then not be far below
        the plan either.
    """
    if "error" in row:
        return [f"does not compile: {row['error']}"]
    found = []
    peak = row["peak_bytes"]
    if target.hbm_bytes and peak > target.hbm_bytes:
        found.append(f"needs {peak / MIB:,.0f} MiB of {target.hbm_bytes / MIB:,.0f} MiB")
    if row["step"] and planned:
        if peak > planned * (1 + TOLERANCE):
            found.append(f"peak {peak / MIB:,.0f} MiB is above the {planned / MIB:,.0f} MiB planned")
        if is_largest and peak < planned * (1 - TOLERANCE):
            found.append(f"peak {peak / MIB:,.0f} MiB is below the {planned / MIB:,.0f} MiB planned: memory is unused")
    if row.get("fast_bytes") and row["fast_bytes"] > target.fast_bytes:
        found.append(f"a kernel reserves {row['fast_bytes']:,} bytes of {target.fast_bytes:,} on the chip")
    if row.get("spill_bytes"):
        found.append(f"a kernel spills {row['spill_bytes']:,} bytes of its registers to memory")
    if not target.plain_attention and row.get("attention_kernels", 0) < row.get("attentions", 0):
        found.append(
            f"{row['attention_kernels']} of {row['attentions']} layers attend with a kernel, the others with XLA"
        )
    if (experts := row.get("experts")) and experts["average"] >= EXPERT_ROWS:
        if experts["multiplied"] > OPERATIONS_SLACK:
            times = f"{experts['multiplied']:.2f} times the rows of experts are multiplied"
            found.append(f"{times}, at most {OPERATIONS_SLACK} where each has {experts['average']:.0f}")
    if row.get("latent_bytes") and not target.plain_attention:
        most = max(int(LATENT_SHARE * row["latent_bytes"]), LATENT_BYTES)
        if (temporaries := row["workspace_bytes"] - row["result_bytes"]) > most:
            found.append(f"temporaries of {temporaries / MIB:,.1f} MiB besides the result, at most {most / MIB:,.1f}")
    if "needs" in row:
        found.extend(_more_than_needed(row, target))
    found.extend(f"copies {copy}" for copy in row["copies"])
    if row["collectives"] and target.num_devices == 1:
        found.append(f"talks to other devices although there is one: {row['collectives']}")
    found.extend(f"exchanges: {text}" for text in row["wrong_exchanges"])
    return found


def overfull(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each stage whose loaded programs together hold more bytes than planned, by more than the
    share TOLERANCE.

    Rows that are not steps, or have no "held_bytes", do not count. A stage for which nothing is planned gets no
    sentence.
    """
    found = []
    steps = [row for row in rows if row["step"] and "held_bytes" in row]
    for target, stage in dict.fromkeys((row["target"], row["stage"]) for row in steps):
        own = [row for row in steps if (row["target"], row["stage"]) == (target, stage)]
        held, planned = sum(row["held_bytes"] for row in own), own[0]["planned_held"]
        if planned and held > planned * (1 + TOLERANCE):
            found.append(
                f"{target}, stage {stage}: {len(own)} programs hold {held / MIB:,.1f} MiB, {planned / MIB:,.1f} planned"
            )
    return found


def _more_than_needed(row: dict[str, Any], target: Target) -> list[str]:
    """Return a sentence for each figure in which a step exceeds the model's own count, row["needs"], by more than its
    slack.

    Figures are operations, operations in wider types, temporaries besides quantised codes, and bytes moved. Operations
    are not compared if attention is plain XLA, types and temporaries not on CPUs.
    """
    needs, found = row["needs"], []
    done, most = sum(row["operations"].values()), int(needs["operations"] * OPERATIONS_SLACK)
    # Plain attention multiplies whole tiles, which are mostly empty for few tokens.
    if done > most and not target.plain_attention:
        found.append(f"{done:,} operations in products, at most {most:,} are the model's")
    own = jnp.dtype(row["dtype"]).itemsize
    wide = {name: count for name, count in row["operations"].items() if WIDTHS.get(name, 0) > own}
    # XLA:CPU multiplies bfloat16 operands in float32.
    if target.backend != "cpu" and sum(wide.values()) > WIDE_SHARE * needs["operations"]:
        found.append(
            f"operations of a {row['dtype']} model in {', '.join(f'{name}: {n:,}' for name, n in wide.items())}"
        )
    # XLA:CPU converts operands to float32.
    if needs["quantized_bytes"] and target.backend != "cpu":
        most = int(WIDENED_SHARE * needs["quantized_bytes"]) + needs["row_bytes"] + needs["gathered_bytes"]
        if (temporaries := row["workspace_bytes"]) > most:
            found.append(f"temporaries of {temporaries:,} bytes besides codes, at most {most:,} are the model's")
    rows = ROWS_SLACK[target.backend] * needs["row_bytes"]
    # XLA:CPU converts bfloat16 weights to float32 before it multiplies.
    weights = needs["weight_bytes"] * (WEIGHTS_SLACK if target.backend != "cpu" else 6)
    beside = STATES_SLACK * needs["state_bytes"] + 3 * needs["gathered_bytes"]  # read, written and read again
    if row["moved_bytes"] > (most := int(weights + rows + beside) + SMALL_BYTES):
        found.append(f"moves {row['moved_bytes']:,} bytes to and from memory, at most {most:,} are the model's")
    return found
