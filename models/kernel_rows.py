"""Platforms whose kernels programs run: for options that choose them, and code that counts or repeats their steps."""

from __future__ import annotations

from jaxengine.pallas_kernels.cards import plain_operations, why_no_kernels
from jaxengine.pallas_kernels.interpreted import INTERPRETED, interpreted
from jaxengine.pallas_kernels.registry import (
    PLATFORM_OF_OPTION,
    PLATFORMS,
    TOKEN_ROWS,
    attention_rows,
    backend_of,
    has_kernels,
    is_kernel,
    kernel_rows,
    layout_of,
    rows_of,
    without_rows,
)
from jaxengine.pallas_kernels.tuning import tuning_of

__all__ = [
    "INTERPRETED",
    "PLATFORMS",
    "PLATFORM_OF_OPTION",
    "TOKEN_ROWS",
    "attention_rows",
    "backend_of",
    "has_kernels",
    "interpreted",
    "is_kernel",
    "kernel_rows",
    "layout_of",
    "plain_operations",
    "rows_of",
    "tuning_of",
    "why_no_kernels",
    "without_rows",
]
