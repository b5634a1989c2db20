"""Views of a checkpoint with an adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource

Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]


class MergedSource(WrappedSource):
    """WeightSource of a checkpoint as it is, together with an adapter that the loader merges into it.

    An adapter's matrices are those of the model's modules, which checkpoints may join, stack, number or transpose
    otherwise: the loader adds them to its view of the checkpoint under the model's names (`added_to`).

    Attributes:
      checkpoint: the checkpoint.

    matrices: by module of the model, A [r, in] and B [out, r], scaled.
    """

    def __init__(self, checkpoint: WeightSource, matrices: Matrices):
        super().__init__(checkpoint)
        self.checkpoint, self._matrices = checkpoint, matrices

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._source.read(name, rows, columns)

    def added_to(self, held: WeightSource) -> WeightSource:
        """Return `held`, a view of the checkpoint under the model's names, with the adapter merged. Raises
        ModelFileError if it lacks the weight of a module that the adapter changes.
        """
        return AddedSource(held, self._matrices)


class AddedSource(WrappedSource):
    """WeightSource under the model's names in which `NAME.weight`, W [out, in], is W + B A for each NAME of `matrices`,
    in float32, computed for each part as it is read. Other tensors are unchanged.

    Raises ModelFileError if `source` lacks one of these weights.
    """

    def __init__(self, source: WeightSource, matrices: Matrices):
        super().__init__(source)
        self._matrices = {f"{module}.weight": pair for module, pair in matrices.items()}
        if missing := sorted(self._matrices.keys() - set(source.names())):
            raise ModelFileError(self.path, "the adapter changes it, but the checkpoint has no such matrix", missing[0])

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        array = self._source.read(name, rows, columns)
        if name not in self._matrices:
            return array
        a, b = (each.astype(np.float32) for each in self._matrices[name])
        return array.astype(np.float32) + b[rows] @ a[:, columns]
