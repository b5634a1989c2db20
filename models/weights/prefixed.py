"""Checkpoints whose tensors are named without the "model." that names begin with elsewhere.

A pooling model that was saved without its head, as *Model, has such names. Knows nothing of file formats.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from models.weights.source import WHOLE, WeightSource

PREFIX = "model."
# What stands beside the model proper, in either spelling.
_BESIDE = ("lm_head.", "score.")


class PrefixedSource:
    """A WeightSource that calls tensors by the names that they have in other checkpoints."""

    def __init__(self, source: WeightSource):
        self._source = source

    @property
    def path(self) -> str:
        return self._source.path

    def names(self) -> Iterable[str]:
        return [name if name.startswith(_BESIDE) else PREFIX + name for name in self._source.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name.removeprefix(PREFIX))

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._source.read(name.removeprefix(PREFIX), rows, columns)

    def close(self) -> None:
        self._source.close()


def with_prefix(source: WeightSource) -> WeightSource:
    """The checkpoint by names that begin with "model.", whether its own do or not."""
    return source if any(name.startswith(PREFIX) for name in source.names()) else PrefixedSource(source)
