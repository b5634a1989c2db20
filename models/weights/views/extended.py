"""View of a checkpoint with further tensors, which follow from its other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource


class ExtendedSource(WrappedSource):
    """WeightSource that has the arrays `added`, by name, as well as the tensors of `source`, whose names they must not
    have. Parts of them are read as views, not copied.
    """

    def __init__(self, source: WeightSource, added: Mapping[str, np.ndarray]):
        super().__init__(source)
        self._added = dict(added)

    def names(self) -> Iterable[str]:
        return [*self._source.names(), *self._added]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._added[name].shape if name in self._added else self._source.shape(name)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return these rows and columns in the tensor's dtype. Raises ModelFileError for an invalid file."""
        if name not in self._added:
            return self._source.read(name, rows, columns)
        tensor = self._added[name]
        return tensor[(rows, columns)[: tensor.ndim]]
