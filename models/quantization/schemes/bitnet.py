"""BitNet b1.58 checkpoints (Ma et al. 2024, arXiv:2402.17764): weights of -1, 0 and 1 with a scale for each matrix,
multiplied with rows that are rounded to int8 with a scale for each token. Published as packed pairs of bits, or as the
floating-point weights that training rounds in this way in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.models.quantization.base.rules import LINEAR, Quantization, names_in, one_of, refuse
from jaxengine.models.quantization.base.stored import SCALAR, Activation, InOrder, Shape, StoredModule

METHOD = "bitnet"
# Weights that a byte holds.
PER_BYTE = 4
_LEAST = np.float32(1e-5)  # of the mean magnitude that is a matrix's scale


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that transformers' BitNetQuantConfig describes: all matrices but those in
    modules_to_not_convert are Ternary, or RoundedTernary for the linear_class "autobitlinear" with the
    quantization_mode "online"; with the usual linear_class, "bitlinear", their scales divide. Raises ModelConfigError
    for unsupported settings.
    """
    refuse(settings, "use_rms_norm")
    kind = one_of(settings, "linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = one_of(settings, "quantization_mode", ("offline", "online"), "offline")
    stored = RoundedTernary() if (kind, mode) == ("autobitlinear", "online") else Ternary(divides=kind == "bitlinear")
    return Quantization(METHOD, (((LINEAR,), stored),), listed=names_in(settings, "modules_to_not_convert"))


@dataclass(frozen=True)
class Ternary(InOrder):
    """Storage format of `weight` u8 [out / 4, in], weights plus one, two bits each, and one number, `weight_scale`.

    The lowest two bits of all bytes are the first quarter of the rows, the next two bits the second quarter, and so on.
    divides: whether weights are codes divided by the scale; otherwise they are multiplied by it. Reading codes raises
    ModelFileError for the pair of bits 3.
    """

    divides: bool
    format: str = f"{METHOD} (1.58 bits)"
    dtype: str = "int8"
    group: None = None
    has_zeros: bool = False
    activation: Activation = Activation("int8")

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        return {"weight": ((-(-out // PER_BYTE), size),), "weight_scale": SCALAR}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless `weight` is u8 and `weight_scale` is finite and above 0."""
        module.read("weight", "uint8", slice(0, 1), slice(0, 1))
        scale = module.read("weight_scale")
        if not np.isfinite(scale).all() or (scale <= 0).any():
            raise module.fail("weight_scale", f"must be a finite number > 0, got {scale.ravel()[0]}")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        first, last, _ = rows.indices(module.shape[0])
        height = -(-module.shape[0] // PER_BYTE)
        parts = []
        for part in range(PER_BYTE):
            begin, end = max(first, part * height), min(last, (part + 1) * height)
            if begin < end:
                own = slice(begin - part * height, end - part * height)
                parts.append(module.read("weight", "uint8", own, columns) >> (2 * part) & 3)
        codes = np.concatenate(parts).astype(np.int8) - np.int8(1)
        if codes.size and codes.max() > 1:
            raise module.fail("weight", "holds a pair of bits that is not a weight: 3")
        return codes

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        first, last, _ = rows.indices(module.shape[0])
        scale = module.read("weight_scale").reshape(1, 1)
        return np.broadcast_to(1 / scale if self.divides else scale, (last - first, 1)), None


@dataclass(frozen=True)
class RoundedTernary(InOrder):
    """Storage format of a floating-point matrix `weight` [out, in], whose weights are divided by the mean magnitude of
    all and rounded to -1, 0 or 1 at load.
    """

    format: str = f"{METHOD} (rounded at load)"
    dtype: str = "int8"
    group: None = None
    has_zeros: bool = False
    activation: Activation = Activation("int8")

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        return {"weight": (module.shape,)}

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        weight = module.read("weight")
        return np.clip(np.rint(weight[rows, columns] / self._scale(module, weight)), -1, 1).astype(np.int8)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        first, last, _ = rows.indices(module.shape[0])
        return np.broadcast_to(self._scale(module, module.read("weight")), (last - first, 1)), None

    def _scale(self, module: StoredModule, weight: np.ndarray) -> np.ndarray:
        """Return the mean magnitude of a matrix, at least 1e-5, as f32[1, 1]. Raises ModelFileError if it is not
        finite.
        """
        scale = np.maximum(np.abs(weight).mean(dtype=np.float64), _LEAST).astype(np.float32).reshape(1, 1)
        if not np.isfinite(scale).all():
            raise module.fail("weight", "holds a value that is not a finite number")
        return scale
