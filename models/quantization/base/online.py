"""Quantisation at load: matrices of a plain checkpoint, rounded as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxengine.models.quantization.base.stored import InOrder, Shape, StoredModule

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@dataclass(frozen=True)
class Rounded(InOrder):
    """Storage format of floating-point matrices `weight` [out, in], whose weights are rounded to the nearest codes at
    load.

    int8 and e4m3 have a scale per channel: its largest weight divided by the largest code. int4 has scales and zero
    points per group of inputs, which map the smallest and largest weight of a group, 0 included, to the ends of the
    codes.
    """

    format: str
    dtype: str
    group: int | None = None
    activation: None = None

    @property
    def has_zeros(self) -> bool:
        return self.dtype == "int4"

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        return {"weight": (module.shape,)}

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        weight = module.read("weight", None, rows)
        scales, points = self._fitted(module, weight)
        codes = weight / self._spread(scales, weight.shape[1])
        if self.dtype == "float8_e4m3fn":
            return np.clip(codes, -448, 448).astype(ml_dtypes.float8_e4m3fn)[:, columns]
        if self.dtype == "int8":
            return np.rint(codes).astype(np.int8)[:, columns]
        codes = np.rint(codes) + self._spread(points, weight.shape[1])
        return (np.clip(codes, 0, 15) - 8).astype(np.int8)[:, columns]

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        scales, points = self._fitted(module, module.read("weight", None, rows))
        return scales, (points - 8) * scales if self.has_zeros else None

    def _fitted(self, module: StoredModule, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scales and zero points, f32 [rows, n] each, for the n groups of weights f32 [rows, in]: the largest
        code stands for a group's largest magnitude, or for int4 15 steps for the range of its weights and 0. Zero
        points are zeros except for int4; a scale that would be 0 is 1.

        Raises ModelFileError for weights without a finite scale: a NaN would round to an arbitrary code.
        """
        size = weight.shape[1]
        starts = np.arange(0, size, self.group or size)
        low = np.minimum(np.minimum.reduceat(weight, starts, axis=1), 0)
        high = np.maximum(np.maximum.reduceat(weight, starts, axis=1), 0)
        with np.errstate(over="ignore", invalid="ignore"):
            span, steps = (high - low, 15) if self.has_zeros else (np.maximum(high, -low), _LARGEST[self.dtype])
        if not np.isfinite(span).all():
            raise module.fail("weight", "holds a value that is not a finite number, or too large to be rounded")
        scales = span / np.float32(steps)
        scales = np.where(scales > 0, scales, np.float32(1))  # for zeros, and for values so small that 0 results
        return scales, np.rint(-low / scales) if self.has_zeros else np.zeros_like(scales)

    def _spread(self, groups: np.ndarray, size: int) -> np.ndarray:
        """Return the numbers of groups [rows, n] repeated for each of their inputs, [rows, size]; the last group may be
        cut off.
        """
        return np.repeat(groups, self.group or size, axis=1)[:, :size]
