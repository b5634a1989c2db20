"""View of checkpoints that store several of a model's tensors as one, their rows one after the other, as transformers 5
holds the convolutions of queries, keys and values in memory.

NAME.conv1d.weight [Q + K + V, L]     NAME.q_conv1d.weight [Q, L], NAME.k_conv1d.weight [K, L], NAME.v_conv1d.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, CheckpointNames, WeightSource, WrappedSource


class JoinedRowsSource(WrappedSource):
    """WeightSource of a checkpoint with joined tensors as one with a tensor for each part; a checkpoint without such
    tensors is unchanged.

    names: rules that say which tensors are joined. shapes: shapes of the model's tensors by name. Raises ModelFileError
    for a tensor with another number of rows than its parts have, and for a part that the checkpoint has twice.
    """

    def __init__(self, source: WeightSource, names: CheckpointNames, shapes: Mapping[str, tuple[int, ...]]):
        super().__init__(source)
        # The model's name -> the tensor and its rows; None for all of the tensor of this name.
        self._spans: dict[str, tuple[str, slice] | None] = {}
        for name in source.names():
            parts = [part for part in names.parts_of_rows(name) if part in shapes]
            total, spans = 0, dict[str, tuple[str, slice] | None]({} if parts else {name: None})
            for part in parts:
                spans[part] = name, slice(total, total + shapes[part][0])
                total += shapes[part][0]
            if parts and source.shape(name)[:1] != (total,):
                text = f"must have the {total} rows of {', '.join(parts)}, got shape {source.shape(name)}"
                raise ModelFileError(source.path, text, name)
            if twice := sorted(spans.keys() & self._spans.keys()):
                raise ModelFileError(source.path, f"stands for {twice[0]}, as does another tensor", name)
            self._spans |= spans

    def names(self) -> Iterable[str]:
        return self._spans.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if (span := self._spans[name]) is None:
            return self._source.shape(name)
        stored, own = span
        return own.stop - own.start, *self._source.shape(stored)[1:]

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        if (span := self._spans[name]) is None:
            return self._source.read(name, rows, columns)
        stored, own = span
        first, last, _ = rows.indices(own.stop - own.start)
        return self._source.read(stored, slice(own.start + first, own.start + max(first, last)), columns)
