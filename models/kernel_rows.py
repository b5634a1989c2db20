"""Platform whose kernels programs run, for code that records steps and runs them again elsewhere."""

from __future__ import annotations

from jaxengine.pallas_kernels.cards import lowers_triton, plain_operations, why_no_kernels
from jaxengine.pallas_kernels.interpreted import interpreted
from jaxengine.pallas_kernels.registry import (
    has_kernels,
    kernel_rows,
    rows_of,
    without_rows,
)

__all__ = [
    "has_kernels",
    "interpreted",
    "kernel_rows",
    "lowers_triton",
    "plain_operations",
    "rows_of",
    "why_no_kernels",
    "without_rows",
]
