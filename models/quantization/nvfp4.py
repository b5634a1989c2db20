"""Matrices in NVFP4, as compressed-tensors packs them: e2m1 numbers, 16 of which share an e4m3 scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.quantization.mxfp4 import DOUBLED
from models.quantization.stored import SCALAR, InOrder, Shape, StoredModule, num_groups

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(InOrder):
    """`weight_packed` u8 [out, in / 2], the even input in the low bits, `weight_scale` e4m3 [out, in / 16], and
    `weight_global_scale` f32, by which scales are divided.

    Codes are int8: twice the numbers, whose scales are half of what is stored.
    """

    format: str
    dtype: str = "int8"
    group: int = GROUP
    has_zeros: bool = False
    activation: None = None

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        return {
            "weight_packed": ((out, num_groups(size, 2)),),
            "weight_scale": ((out, num_groups(size, GROUP)),),
            "weight_global_scale": SCALAR,
        }

    def check(self, module: StoredModule) -> None:
        module.read("weight_packed", "uint8", slice(0, 1))
        module.read("weight_scale", "float8_e4m3fn", slice(0, 1))
        if not (whole := self._global(module)) > 0 or not np.isfinite(whole):
            raise module.fail("weight_global_scale", f"must be finite and > 0, got {whole}")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        first, last, _ = columns.indices(module.shape[1])
        pairs = module.read("weight_packed", "uint8", rows, slice(first // 2, num_groups(last, 2)))
        values = np.stack([DOUBLED[pairs & 15], DOUBLED[pairs >> 4]], axis=-1).reshape(len(pairs), -1)
        return values[:, first % 2 :][:, : last - first]

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        held = module.read("weight_scale", "float8_e4m3fn", rows).astype(np.float32)
        return held / self._global(module) * np.float32(0.5), None

    def _global(self, module: StoredModule) -> np.float32:
        return module.read("weight_global_scale").reshape(1)[0]
