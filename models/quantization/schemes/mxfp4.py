"""MXFP4 (OCP Microscaling Formats 1.0), used by gpt-oss's experts and compressed-tensors: e2m1 numbers, 32 of which
share an exponent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.models.quantization.base.rules import Quantization, names_in
from jaxengine.models.quantization.base.stored import Activation, InOrder, Shape, StoredModule

METHOD = "mxfp4"
GROUP = 32
# Twice the value of each four-bit number: a sign, two bits of exponent, one of mantissa.
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def doubled(module: StoredModule, kind: str, dtype: str, rows: slice, columns: slice) -> np.ndarray:
    """Return twice the e2m1 numbers of `kind`, i8 [rows, columns]. Raises ModelFileError for another dtype."""
    first, last, _ = columns.indices(module.shape[1])
    pairs = module.read(kind, dtype, rows, slice(first // 2, -(-last // 2))).view(np.uint8)
    values = np.stack([DOUBLED[pairs & 15], DOUBLED[pairs >> 4]], axis=-1).reshape(len(pairs), -1)
    return values[:, first % 2 :][:, : last - first]


@dataclass(frozen=True)
class Mxfp4(InOrder):
    """Storage format of pairs of e2m1 numbers, u8 [out, in / 2], the even input in the low bits, and exponents plus
    127, u8 [out, in / 32].

    gpt-oss's tensors are one expert's part of a stack (jaxengine.models.weights.views.stacked). Codes are int8: twice
    the numbers, with half the stored scales.

    Attributes:
      pairs, exponents: names of the tensors.
      bytes_as: dtypes with which both are stored, one byte each.
    """

    format: str = METHOD
    pairs: str = "blocks"
    exponents: str = "scales"
    bytes_as: tuple[str, str] = ("uint8", "uint8")
    dtype: str = "int8"
    group: int = GROUP
    has_zeros: bool = False
    activation: Activation | None = None

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        return {self.pairs: ((out, -(-size // GROUP) * GROUP // 2),), self.exponents: ((out, -(-size // GROUP)),)}

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError for pairs and exponents of another dtype than `bytes_as`, and for the exponent 255,
        which stands for no number.
        """
        module.read(self.pairs, self.bytes_as[0], slice(0, 1))
        if np.any(module.read(self.exponents, self.bytes_as[1]).view(np.uint8) == 255):
            raise module.fail(self.exponents, "255 stands for no number")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        return doubled(module, self.pairs, self.bytes_as[0], rows, columns)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        exponents = module.read(self.exponents, self.bytes_as[1], rows).view(np.uint8).astype(np.int32)
        return np.ldexp(np.float32(0.5), exponents - 127).astype(np.float32), None


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that MXFP4 settings of gpt-oss describe: experts alone are MXFP4, except those that
    modules_to_not_convert lists. Raises ModelConfigError for unsupported settings.
    """
    listed = names_in(settings, "modules_to_not_convert")
    return Quantization(METHOD, ((("re:.*[.]experts[.]",), Mxfp4()),), listed=listed)
