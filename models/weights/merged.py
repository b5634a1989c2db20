"""A checkpoint with an adapter in its weights. Knows no file format."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from models.weights.peft import AdapterWeights
from models.weights.source import WHOLE, CheckpointNames, WeightSource, WrappedSource


class MergedSource(WrappedSource):
    """The WeightSource of W + B A for each matrix that an adapter changes, in float32, a part at a time as it is read.

    names: how the checkpoint's names become the model's.
    """

    def __init__(self, source: WeightSource, adapter: AdapterWeights, names: CheckpointNames):
        super().__init__(source)
        matrices = {f"{module}.weight": matrices for module, matrices in adapter.matrices.items()}
        modules = {stored: names.renamed(stored) for stored in source.names()}
        self._changed = {stored: matrices[name] for stored, name in modules.items() if name in matrices}

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        array = self._source.read(name, rows, columns)
        if name not in self._changed:
            return array
        a, b = self._changed[name]
        return array.astype(np.float32) + b[rows].astype(np.float32) @ a[:, columns].astype(np.float32)
