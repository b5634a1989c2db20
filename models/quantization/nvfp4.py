"""Matrices in NVFP4: e2m1 numbers, 16 of which share an e4m3 scale, beside one float32 scale for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.quantization.mxfp4 import DOUBLED
from models.quantization.stored import SCALAR, Activation, InOrder, Shape, StoredModule, num_groups
from pallas_kernels.matmul.rounding import E4M3

GROUP = 16
# Rows of four bits: scales of e4m3, made of a group's largest value, and a scale for all rows that the checkpoint has.
ROWS = Activation("float4_e2m1fn", group=GROUP, static=True, scales=E4M3)


@dataclass(frozen=True)
class Nvfp4(InOrder):
    """`weight_packed` u8 [out, in / 2], the even input in the low bits, `weight_scale` e4m3 [out, in / 16], and
    `weight_global_scale` f32, by which scales are divided; `input_global_scale` f32, likewise, of rows.

    So compressed-tensors has it. Codes are int8: twice the numbers, whose scales are half of what is stored, divided
    by the scale of rows where these are rounded.

    Attributes:
      pairs, whole, rows: what the tensors are called but for `weight_scale`.
      divides: else scales are multiplied by the two, as ModelOpt has it.
    """

    format: str
    activation: Activation | None = None
    pairs: str = "weight_packed"
    whole: str = "weight_global_scale"
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
            self.whole: SCALAR,
            **({} if self.activation is None else {self.rows: SCALAR}),
        }

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        # Of rows that were to be of four bits where the configuration says that they are not.
        return {self.rows: SCALAR}

    def check(self, module: StoredModule) -> None:
        module.read(self.pairs, "uint8", slice(0, 1))
        module.read("weight_scale", "float8_e4m3fn", slice(0, 1))
        for kind in (self.whole, *(() if self.activation is None else (self.rows,))):
            value = module.read(kind).reshape(1)[0]
            if not value >= np.finfo(np.float32).tiny or not np.isfinite(value):
                raise module.fail(kind, f"must be finite and > 0, no subnormal number, got {value}")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        first, last, _ = columns.indices(module.shape[1])
        pairs = module.read(self.pairs, "uint8", rows, slice(first // 2, num_groups(last, 2)))
        values = np.stack([DOUBLED[pairs & 15], DOUBLED[pairs >> 4]], axis=-1).reshape(len(pairs), -1)
        return values[:, first % 2 :][:, : last - first]

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        held = module.read("weight_scale", "float8_e4m3fn", rows).astype(np.float32)
        whole = module.read(self.whole).reshape(1)[0]
        scales = (held / whole if self.divides else held * whole) * np.float32(0.5)
        # Rows come multiplied by what is the same in all of them.
        return scales if self.activation is None else scales / self.input_scale(module), None

    def input_scale(self, module: StoredModule) -> np.ndarray:
        held = module.read(self.rows).reshape(1)
        return held if self.divides else np.float32(1) / held
