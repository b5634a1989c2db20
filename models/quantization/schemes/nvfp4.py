"""NVFP4 matrices: e2m1 numbers, 16 of which share an e4m3 scale, and one global float32 scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxengine.models.quantization.base.stored import SCALAR, Activation, InOrder, Shape, StoredModule, num_groups
from jaxengine.models.quantization.schemes.mxfp4 import doubled
from jaxengine.pallas_kernels.matmul.rounding import E4M3

GROUP = 16
# Rows of four bits: scales of e4m3 from a group's largest value, and a global scale from the checkpoint.
ROWS = Activation("float4_e2m1fn", group=GROUP, static=True, scales=E4M3)


@dataclass(frozen=True)
class Nvfp4(InOrder):
    """Storage format of `weight_packed` u8 [out, in / 2], the even input in the low bits, `weight_scale` e4m3 [out, in
    / 16], and `weight_global_scale` f32, by which the scales are divided. `input_global_scale` f32 is the same for
    rows.

    These are the names of compressed-tensors. Codes are int8: twice the numbers, with half the stored scales, divided
    by the scale of rows if these are rounded.

    Attributes:
      pairs, global_scale, rows: names of the tensors other than `weight_scale`.
      divides: whether scales are divided by the global ones; otherwise they are multiplied, as in ModelOpt.
    """

    format: str
    activation: Activation | None = None
    pairs: str = "weight_packed"
    global_scale: str = "weight_global_scale"
    rows: str = "input_global_scale"
    divides: bool = True
    dtype: str = "int8"
    group: int = GROUP
    has_zeros: bool = False

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        return {
            self.pairs: ((out, num_groups(size, 2)),),
            "weight_scale": ((out, num_groups(size, GROUP)),),
            self.global_scale: SCALAR,
            **({} if self.activation is None else {self.rows: SCALAR}),
        }

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        # A scale for four-bit rows may be present although the configuration does not round rows.
        return {self.rows: SCALAR}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless pairs are u8, weight_scale is e4m3, and global scales, also those of rounded
        rows, are finite normal numbers above 0.
        """
        module.read(self.pairs, "uint8", slice(0, 1))
        module.read("weight_scale", "float8_e4m3fn", slice(0, 1))
        for kind in (self.global_scale, *(() if self.activation is None else (self.rows,))):
            value = module.read(kind).reshape(1)[0]
            if not value >= np.finfo(np.float32).tiny or not np.isfinite(value):
                raise module.fail(kind, f"must be finite and > 0, no subnormal number, got {value}")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        return doubled(module, self.pairs, "uint8", rows, columns)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        held = module.read("weight_scale", "float8_e4m3fn", rows).astype(np.float32)
        global_scale = module.read(self.global_scale).reshape(1)[0]
        scales = (held / global_scale if self.divides else held * global_scale) * np.float32(0.5)
        # Rounded rows are multiplied by their global scale, which is divided out here.
        return scales if self.activation is None else scales / self.input_scale(module), None

    def input_scale(self, module: StoredModule) -> np.ndarray:
        """Return the factor of a row's scales, f32[1]: the stored global scale of rows if `divides`, otherwise its
        reciprocal.
        """
        held = module.read(self.rows).reshape(1)
        return held if self.divides else np.float32(1) / held
