"""Candidate sizes of quantised products for `jaxengine tune`, re-exported from the kernels."""

from __future__ import annotations

from jaxengine.pallas_kernels.matmul.candidates import Candidate, Problem
from jaxengine.pallas_kernels.registry import product_candidates
from jaxengine.pallas_kernels.tuned import Entry
from jaxengine.pallas_kernels.tuned_products import TABLE

__all__ = ["TABLE", "Candidate", "Entry", "Problem", "product_candidates"]
