"""Which function implements an operation on a platform: one row each, no fallbacks.

Owns the table and the error for a missing row. A new kernel is a module and a row here; the conformance suite runs
over the rows.
"""

from __future__ import annotations

from collections.abc import Callable

from pallas_kernels import paged_attention_schedule, paged_attention_xla

KERNELS: dict[tuple[str, str], Callable] = {
    ("attention_schedule", "cpu"): paged_attention_schedule.attention_schedule,
    ("ragged_paged_attention", "cpu"): paged_attention_xla.ragged_paged_attention,
}


def kernel(op: str, platform: str) -> Callable:
    """The implementation of `op` on `platform`; raises ValueError naming the platforms that have one."""
    if (op, platform) not in KERNELS:
        platforms = sorted(row_platform for row_op, row_platform in KERNELS if row_op == op)
        raise ValueError(
            f"{op} is not implemented for platform {platform!r}, allowed: {', '.join(platforms) or 'none'}"
        )
    return KERNELS[op, platform]
