"""Candidate sizes of quantised products for `jaxengine tune`, re-exported from the kernels."""

from __future__ import annotations

from pallas_kernels.matmul.candidates import Candidate, Problem
from pallas_kernels.registry import product_candidates
from pallas_kernels.tuned import Entry
from pallas_kernels.tuned_products import TABLE

__all__ = ["TABLE", "Candidate", "Entry", "Problem", "product_candidates"]
