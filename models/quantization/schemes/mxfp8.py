"""MXFP8 (OCP Microscaling Formats 1.0), used by compressed-tensors, ModelOpt and MiniMax: e4m3 numbers, 32 of which
share an exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.models.quantization.base.rules import LINEAR, Quantization, bad, block_size, names_in, one_of
from jaxengine.models.quantization.base.stored import Activation, InOrder, Shape, StoredModule, num_groups
from jaxengine.models.quantization.schemes.mxfp4 import GROUP
from jaxengine.pallas_kernels.matmul.rounding import UE8M0

METHOD = "mxfp8"
_E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Mxfp8(InOrder):
    """Storage format of `weight` e4m3 [out, in] and u8 [out, in / 32], exponents plus 127.

    exponents: name of the latter tensor.
    """

    format: str
    activation: Activation | None = None
    exponents: str = "weight_scale"
    dtype: str = _E4M3
    group: int = GROUP
    has_zeros: bool = False

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        return {"weight": ((out, size),), self.exponents: ((out, num_groups(size, GROUP)),)}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless `weight` has the format's dtype and exponents are u8, and for the exponent 255,
        which stands for no number.
        """
        module.read("weight", self.dtype, slice(0, 1))
        if np.any(module.read(self.exponents, "uint8") == 255):
            raise module.fail(self.exponents, "255 stands for no number")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        return module.read("weight", self.dtype, rows, columns)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        exponents = module.read(self.exponents, "uint8", rows).astype(np.int32)
        return np.ldexp(np.float32(1), exponents - 127).astype(np.float32), None


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that settings with the method "mxfp8" describe (MiniMax M3): all matrices are MXFP8 with
    exponents in `weight_scale_inv`, and rows are rounded to it, except in modules of modules_to_not_convert and
    ignored_layers, which are plain. Raises ModelConfigError for unsupported settings.
    """
    one_of(settings, "fmt", ("e4m3", _E4M3), "e4m3")
    one_of(settings, "activation_scheme", ("dynamic",), "dynamic")
    one_of(settings, "scale_fmt", ("ue8m0",), "ue8m0")
    if block_size(settings, "weight_block_size") not in (None, (1, GROUP)):
        raise bad("weight_block_size", settings["weight_block_size"], f"[1, {GROUP}]")
    stored = Mxfp8(METHOD, Activation(_E4M3, GROUP, scales=UE8M0), "weight_scale_inv")
    listed = names_in(settings, "modules_to_not_convert") + names_in(settings, "ignored_layers")
    return Quantization(METHOD, (((LINEAR,), stored),), listed=listed)
