"""Matrices of a GGUF file kept quantised: the codes, scales and zeros of its blocks.

The layout of blocks is decoded in jaxengine.models.weights.gguf.dequant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxengine.models.quantization.base.stored import InOrder, Shape, StoredModule

METHOD = "gguf"
# Tensors of a module that jaxengine.models.weights.gguf.file provides instead of its blocks.
CODES, SCALES, ZEROS = "codes", "scales", "zeros"


@dataclass(frozen=True)
class Blocks(InOrder):
    """Storage format of `codes` i8 [out, in], `scales` f32 [out, in / 16 or in / 32], repeated for a smaller `group`,
    and, in some formats, `zeros` of the shape of the scales, else 0.

    Codes of four bits with zeros begin at 0 in a file and at -8 here; zeros are shifted accordingly, which may round in
    the last bit of float32.
    """

    format: str
    dtype: str
    group: int
    has_zeros: bool
    activation: None = None

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        scales = tuple((out, size // group) for group in (self.group, 2 * self.group))
        kinds = (SCALES, ZEROS) if module.has(ZEROS) else (SCALES,)
        return {CODES: ((out, size),), **dict.fromkeys(kinds, scales)}

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        codes = module.read(CODES, "int8", rows, columns)
        return codes - np.int8(8) if self._is_moved(module) else codes

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        scales = module.read(SCALES, None, rows)
        zeros = module.read(ZEROS, None, rows) if module.has(ZEROS) else np.zeros_like(scales)
        if self._is_moved(module):
            zeros = zeros - 8 * scales
        each = module.shape[1] // self.group // scales.shape[1]
        scales, zeros = (np.repeat(held, each, axis=1) for held in (scales, zeros))
        return scales, zeros if self.has_zeros else None

    def _is_moved(self, module: StoredModule) -> bool:
        """Return whether stored codes begin at 0, so that 8 is subtracted from them."""
        return self.dtype == "int4" and module.has(ZEROS)
