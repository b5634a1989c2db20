"""MXFP8 (OCP Microscaling Formats 1.0), used by compressed-tensors and ModelOpt: e4m3 numbers, 32 of which share an
exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxengine.models.quantization.base.stored import Activation, InOrder, Shape, StoredModule, num_groups
from jaxengine.models.quantization.schemes.mxfp4 import GROUP


@dataclass(frozen=True)
class Mxfp8(InOrder):
    """Storage format of `weight` e4m3 [out, in] and `weight_scale` u8 [out, in / 32], exponents plus 127."""

    format: str
    activation: Activation | None = None
    dtype: str = "float8_e4m3fn"
    group: int = GROUP
    has_zeros: bool = False

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        return {"weight": ((out, size),), "weight_scale": ((out, num_groups(size, GROUP)),)}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError for tensors of another dtype, and for the exponent 255, which stands for no number."""
        module.read("weight", self.dtype, slice(0, 1))
        if np.any(module.read("weight_scale", "uint8") == 255):
            raise module.fail("weight_scale", "255 stands for no number")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        return module.read("weight", self.dtype, rows, columns)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        exponents = module.read("weight_scale", "uint8", rows).astype(np.int32)
        return np.ldexp(np.float32(1), exponents - 127).astype(np.float32), None
