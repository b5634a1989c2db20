"""WeightSource over arrays in memory, as a trainer has them: names and orientation of Hugging Face checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WrappedSource

PATH = "the given arrays"


class ArraySource:
    """Tensors by name. Each is copied to host memory when it is read, and only the one read last is kept there."""

    path = PATH

    def __init__(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]):
        """Take tensors: the name and array (numpy or jax, of any sharding) of each.

        Raises ModelFileError for a name that comes twice and for a value that is not an array.
        """
        pairs: list[Any] = [*(tensors.items() if isinstance(tensors, Mapping) else tensors)]
        twice = [
            (str(name), "is given twice") for name, count in Counter(name for name, _ in pairs).items() if count > 1
        ]
        no_arrays = [
            (str(name), f"must be an array, got {type(array).__name__}")
            for name, array in pairs
            if not isinstance(name, str) or not hasattr(array, "shape") or not hasattr(array, "dtype")
        ]
        if faults := [*twice, *no_arrays]:
            (name, text), *others = faults
            raise ModelFileError(PATH, text, name, others=others)
        self._tensors: dict[str, Any] = dict(pairs)
        self._newest: tuple[str, np.ndarray] | None = None

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        if self._newest is None or self._newest[0] != name:
            self._newest = name, np.asarray(self._tensors[name])
        array = self._newest[1]
        return array[(rows, columns)[: array.ndim]].copy()  # the given ones are the trainer's

    def close(self) -> None:
        self._newest = None
        self._tensors = {}


class FiniteSource(WrappedSource):
    """View of a source that refuses floating-point numbers which are not finite."""

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        array = self._source.read(name, rows, columns)
        if jnp.issubdtype(array.dtype, jnp.floating) and not np.isfinite(array).all():
            raise ModelFileError(self.path, "has numbers that are not finite", name)
        return array
