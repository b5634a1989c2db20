"""View of checkpoints whose experts' matrices follow each other in the rows of one matrix, as DBRX has them.

NAME.experts.mlp.w1, v1  [E * F, D]     NAME.experts.{e}.w1.weight, v1.weight [F, D]
NAME.experts.mlp.w2      [E * F, D]     NAME.experts.{e}.w2.weight [D, F]
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxengine.models.params.source import WHOLE, ExpertRows, WeightSource, WrappedSource
from jaxengine.models.params.stored_names import fault_in

_MODULE = ".experts.mlp."


class ExpertRowsSource(WrappedSource):
    """WeightSource of a checkpoint with experts in the rows of one matrix as one with tensors per expert. Raises
    ModelFileError for a matrix whose rows `num_experts` experts cannot share equally.
    """

    def __init__(self, source: WeightSource, names: ExpertRows, num_experts: int):
        super().__init__(source)
        self._parts: dict[str, tuple[str, int, int, bool]] = {}  # matrix, first row and end, whether transposed
        for name in source.names():
            module, _, part = name.rpartition(_MODULE)
            if part not in names.rows + names.turned:
                self._parts[name] = name, 0, 0, False
                continue
            shape = source.shape(name)
            if len(shape) != 2 or shape[0] % num_experts:
                raise fault_in(source, name, f"must be a matrix with the rows of {num_experts} experts, got {shape}")
            size = shape[0] // num_experts
            for expert in range(num_experts):
                rows = expert * size, (expert + 1) * size
                self._parts[f"{module}.experts.{expert}.{part}.weight"] = name, *rows, part in names.turned

    def names(self) -> Iterable[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, first, end, turned = self._parts[name]
        shape = self._source.shape(stored)
        shape = (end - first, *shape[1:]) if end else shape
        return shape[::-1] if turned else shape

    def held_in(self, name: str) -> tuple[str, ...]:
        return (self._parts[name][0],) if name in self._parts else (name,)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        stored, first, end, turned = self._parts[name]
        if not end:
            return self._source.read(stored, rows, columns)
        rows, columns = (columns, rows) if turned else (rows, columns)
        start, stop, _ = rows.indices(end - first)
        values = self._source.read(stored, slice(first + start, first + stop), columns)
        return values.T if turned else values
