"""WeightSource: what the parameter loader asks of any checkpoint format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

WHOLE = slice(None)
_NONE: Mapping[str, float] = MappingProxyType({})


class StackedExperts(NamedTuple):
    """That a family stores the matrices of all experts of a layer in one tensor, see models.weights.stacked.

    interleaved: rows of gate and up take turns; otherwise all of gate come first.
    out_first: a matrix is [out, in], as a linear layer's is; otherwise [in, out]. None where checkpoints differ in that
      and tell by their shapes, a square matrix being as a linear layer's.
    """

    interleaved: bool = False
    out_first: bool | None = False


class CheckpointNames(NamedTuple):
    """What a family's checkpoints have beside the tensors that its model declares.

    Attributes:
      prefixes: beginnings of names, and what the model says instead; the first that fits counts.
      suffixes: ends of names, likewise.
      unused: beginnings of the names of other parts, which are not read.
      tower: beginnings, as the model says them, of the names of what sees: not read where the model is not to see.
      constants: ends of the names of tensors that hold one number, which the model has in its code, and this number.
      squeezed: ends of the names of tensors whose second axis, of one entry, the model leaves out.
      flattened: ends of the names of tensors of more than two axes whose axes behind the first are one in the model.
      stacked_experts: how experts are stored where they may be in one tensor; None for each in tensors of its own.
      of_adapters: parts of names of modules as adapters may have them, made with other versions of transformers than
        those that checkpoints are named by, and what the model says instead.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    tower: tuple[str, ...] = ()
    constants: Mapping[str, float] = _NONE
    squeezed: tuple[str, ...] = ()
    flattened: tuple[str, ...] = ()
    stacked_experts: StackedExperts | None = None
    of_adapters: tuple[tuple[str, str], ...] = ()

    def renamed(self, stored: str) -> str:
        """What the model calls a tensor, or a module, of the checkpoint."""
        name = renamed(stored, self.prefixes)
        return next((name.removesuffix(old) + new for old, new in self.suffixes if name.endswith(old)), name)


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """The name with what stands for its beginning instead; the first that fits counts."""
    return next((new + name[len(old) :] for old, new in prefixes if name.startswith(old)), name)


class WeightSource(Protocol):
    """Named tensors that are read one at a time, whole or in part.

    Names and orientation are those of Hugging Face checkpoints: linear weights are [out, in], whatever the file's own
    convention. Every method raises ModelFileError for a file that cannot be trusted. `path` is for error messages.
    """

    @property
    def path(self) -> str: ...

    def names(self) -> Iterable[str]:
        """All tensors of the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Known without reading the tensor."""
        ...

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """These rows (first axis) and columns (second axis) of a tensor, in a floating dtype; steps are 1.

        The caller owns the array and lets go of it before the next read.
        """
        ...

    def close(self) -> None: ...


class WrappedSource:
    """The part of a WeightSource over another one that all of these share."""

    def __init__(self, source: WeightSource):
        self._source = source

    @property
    def path(self) -> str:
        return self._source.path

    def close(self) -> None:
        self._source.close()
