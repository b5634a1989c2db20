"""Matrices of one e4m3 or int8 number per weight, with a scale per tensor, per channel or per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxengine.models.params.source import WHOLE
from jaxengine.models.quantization.base.stored import (
    SCALAR,
    Activation,
    InOrder,
    Shape,
    StoredModule,
    input_scale,
    num_groups,
)

TENSOR, CHANNEL, BLOCK = "tensor", "channel", "block"
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True)
class EightBits(InOrder):
    """Storage format of `weight` [out, in] and its factor, `weight_scale` or `weight_scale_inv`.

    Attributes:
      strategy: TENSOR, one scale; CHANNEL, [out, 1]; BLOCK, [out / rows, in / columns], the last blocks cut off.
      block: (rows, columns) of a block. In a matrix whose rows are joined in chunks, blocks may begin anew in each
        chunk, whose last block is then cut off.
    """

    format: str
    dtype: str
    strategy: str
    activation: Activation | None = None
    block: tuple[int, int] | None = None
    has_zeros: bool = False

    @property
    def group(self) -> int | None:
        return None if self.block is None else self.block[1]

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        out, size = module.shape
        shapes: tuple[Shape, ...] = (*SCALAR, (1, 1)) if self.strategy == TENSOR else ((out, 1), (out,))
        if self.block is not None:
            counts = dict.fromkeys((num_groups(out, self.block[0]), self._num_blocks(module)))
            shapes = tuple((count, num_groups(size, self.block[1])) for count in counts)
        needed: dict[str, tuple[Shape, ...]] = {"weight": ((out, size),), module.first_of(*_SCALES): shapes}
        if self.activation is not None and self.activation.static:
            needed[input_scale(module)] = SCALAR
        return needed

    def _num_blocks(self, module: StoredModule) -> int:
        """Return how many blocks of rows a matrix has if they begin anew in each of its chunks; a matrix without chunks
        counts as one.
        """
        assert self.block is not None
        chunk = module.chunk or module.shape[0]
        return module.shape[0] // chunk * num_groups(chunk, self.block[0])

    def optional(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        # Zero points of symmetric rounding, and bounds that the configuration also gives.
        return {
            "weight_zero_point": (*SCALAR, (module.shape[0], 1)),
            "input_zero_point": SCALAR,
            "input_scale_ub": SCALAR,
        }

    def check(self, module: StoredModule) -> None:
        """Raise ModelFileError unless `weight` has the format's dtype and zero points, if present, are all 0."""
        # One number only: in a stack of experts, a row of [out, in] may be a column of the stored tensor.
        module.read("weight", self.dtype, slice(0, 1), slice(0, 1))
        for kind in ("weight_zero_point", "input_zero_point"):
            if module.has(kind) and np.any(module.source.read(module.tensor(kind)).astype(np.float32)):
                raise module.fail(kind, "must be all zeros, for the configuration says symmetric")

    def codes(self, module: StoredModule, rows: slice, columns: slice) -> np.ndarray:
        return module.read("weight", self.dtype, rows, columns)

    def scales(self, module: StoredModule, rows: slice) -> tuple[np.ndarray, np.ndarray | None]:
        out, _ = module.shape
        first, last, _ = rows.indices(out)
        kind = module.first_of(*_SCALES)
        if self.block is None:
            held = module.read(kind).reshape(-1) if self.strategy == TENSOR else module.read(kind, None, rows).ravel()
            return np.broadcast_to(held, (last - first,)).reshape(-1, 1), None
        height = self.block[0]
        if module.source.shape(module.tensor(kind))[0] != num_groups(out, height):  # blocks of chunks
            assert module.chunk is not None
            each, numbers = num_groups(module.chunk, height), np.arange(first, last)
            held = module.read(kind)
            held = held.reshape(len(held), -1)
            return held[numbers // module.chunk * each + numbers % module.chunk // height], None
        held = module.read(kind, None, slice(first // height, num_groups(last, height)), WHOLE)
        held = held.reshape(len(held), -1)  # some write [rows, 1, columns, 1]
        return np.repeat(held, height, axis=0)[first - first // height * height :][: last - first], None
