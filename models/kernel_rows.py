"""Whose kernels programs run, for those that record steps and run them again elsewhere."""

from __future__ import annotations

from jaxengine.pallas_kernels.interpreted import interpreted
from jaxengine.pallas_kernels.registry import kernel_rows, rows_of

__all__ = ["interpreted", "kernel_rows", "rows_of"]
