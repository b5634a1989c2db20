"""View of several checkpoints as one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource, stored_names


class JoinedSource(WrappedSource):
    """WeightSource of a checkpoint and of further ones, whose tensors' names get a prefix for each checkpoint. A
    prefixed name takes precedence over the same name in `source`.
    """

    def __init__(self, source: WeightSource, others: Mapping[str, WeightSource], without: Collection[str] = ()):
        """Wrap the sources. others: further checkpoints by prefix. without: tensors of `source` that are left out.
        `close` closes all checkpoints.
        """
        super().__init__(source)
        self._others, self._without = dict(others), frozenset(without)
        self._where = {f"{prefix}{name}": (prefix, name) for prefix, other in others.items() for name in other.names()}

    def names(self) -> Iterable[str]:
        return (*(name for name in self._source.names() if name not in self._without), *self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        source, own = self._of(name)
        return source.shape(own)

    def stored_names(self, name: str) -> tuple[str, ...]:
        source, own = self._of(name)
        return stored_names(source, own)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        source, own = self._of(name)
        return source.read(own, rows, columns)

    def close(self) -> None:
        """Close all checkpoints."""
        for source in (self._source, *self._others.values()):
            source.close()

    def _of(self, name: str) -> tuple[WeightSource, str]:
        """Return the checkpoint that has the tensor `name`, and its name there."""
        if name not in self._where:
            return self._source, name
        prefix, own = self._where[name]
        return self._others[prefix], own
