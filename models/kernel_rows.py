"""Platform whose kernels programs run, for code that records steps and runs them again elsewhere."""

from __future__ import annotations

from jaxengine.pallas_kernels.interpreted import interpreted
from jaxengine.pallas_kernels.registry import kernel_rows, rows_of

__all__ = ["interpreted", "kernel_rows", "rows_of"]
