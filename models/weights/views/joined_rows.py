"""View of checkpoints that store several of a model's tensors as one, their rows one after the other, as transformers 5
holds the convolutions of queries, keys and values in memory.

NAME.conv1d.weight [Q + K + V, L]     NAME.q_conv1d.weight [Q, L], NAME.k_conv1d.weight [K, L], NAME.v_conv1d.weight

transformers 5 saves parts of equal length, whatever Q, K and V are. A model may also declare the joined tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from jaxengine.models.params.source import (
    WHOLE,
    CheckpointNames,
    WeightSource,
    WrappedSource,
    absent_names,
    stored_names,
)
from jaxengine.models.params.stored_names import fault_in

Spans = list[tuple[str, slice]]  # rows of stored tensors, each by its name


class JoinedRowsSource(WrappedSource):
    """WeightSource of a checkpoint with joined tensors as one with a tensor for each part; a checkpoint without such
    tensors is unchanged. Parts that together have the right number of rows may be cut at other rows than the model's.
    If the model has the joined tensor itself, it takes the place of its parts.

    names: rules that say which tensors are joined. shapes: shapes of the model's tensors by name. Raises ModelFileError
    for a joined tensor with another number of rows than its parts have, for a part that the checkpoint has twice, and
    for parts of a tensor of the model whose rows have another shape.
    """

    def __init__(self, source: WeightSource, names: CheckpointNames, shapes: Mapping[str, tuple[int, ...]]):
        super().__init__(source)
        # The model's name -> its rows, as parts of stored tensors; None for all of the tensor of this name.
        self._spans: dict[str, Spans | None] = {}
        stored = list(source.names())
        for name in stored:
            parts = [part for part in names.parts_of_rows(name) if part in shapes]
            total = sum(shapes[part][0] for part in parts)
            if parts and source.shape(name)[:1] != (total,):
                text = f"must have the {total} rows of {', '.join(parts)}, got shape {source.shape(name)}"
                raise fault_in(source, name, text)
            spans = _cut(self._whole([name]), parts, shapes) if parts else {name: None}
            if twice := sorted(spans.keys() & self._spans.keys()):
                raise fault_in(source, name, f"stands for {twice[0]}, as does {stored_names(self, twice[0])[0]}")
            self._spans |= spans
        for ends in set(names.joined.values()):
            for stem in [name.removesuffix(ends[0]) for name in stored if name.endswith(ends[0])]:
                parts = [stem + end for end in ends]
                if all(part in shapes and self._spans.get(part, ()) is None for part in parts):
                    found, wanted = [source.shape(part)[0] for part in parts], [shapes[part][0] for part in parts]
                    if found != wanted and sum(found) == sum(wanted):
                        self._spans |= _cut(self._whole(parts), parts, shapes)
        self._parts_of = names.parts_of_rows
        for name in shapes.keys() - self._spans.keys():
            parts = names.parts_of_rows(name)
            there = [part for part in parts if self._spans.get(part, ()) is None]
            if there and len(there) < len(parts):
                text = f"a tensor that the model needs beside {stored_names(self, there[0])[0]} is missing"
                raise fault_in(self, next(part for part in parts if part not in there), text)
            if there:
                for part in parts:
                    if not source.shape(part) or source.shape(part)[1:] != shapes[name][1:]:
                        text = f"must be rows of {name} {shapes[name]}, got shape {source.shape(part)}"
                        raise fault_in(source, part, text)
                self._spans = {other: spans for other, spans in self._spans.items() if other not in parts}
                self._spans[name] = self._whole(parts)

    def _whole(self, stored: Iterable[str]) -> Spans:
        """Return all rows of the tensors `stored`, in order."""
        return [(name, slice(0, self._source.shape(name)[0])) for name in stored]

    def names(self) -> Iterable[str]:
        return self._spans.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if (spans := self._spans[name]) is None:
            return self._source.shape(name)
        return sum(own.stop - own.start for _, own in spans), *self._source.shape(spans[0][0])[1:]

    def held_in(self, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stored for stored, _ in self._spans.get(name) or [(name, WHOLE)]))

    def absent_names(self, name: str) -> tuple[str, ...]:
        part, *_ = [*self._parts_of(name), name]
        return absent_names(self._source, part)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return these rows and columns of a tensor. Raises ModelFileError if the parts of these rows are numbers of
        different kinds, which would otherwise become one kind.
        """
        if (spans := self._spans[name]) is None:
            return self._source.read(name, rows, columns)
        first, last, _ = rows.indices(self.shape(name)[0])
        own = _overlap(spans, first, last) or [(spans[0][0], slice(0, 0))]
        found = [self._source.read(stored, each, columns) for stored, each in own]
        kinds = [jnp.issubdtype(each.dtype, jnp.floating) for each in found]
        if any(kinds) and not all(kinds):
            odd = kinds.index(False)
            text = f"a weight must hold floating-point numbers, got {found[odd].dtype}"
            raise fault_in(self._source, own[odd][0], text)
        return found[0] if len(found) == 1 else np.concatenate(found)


class AlternatingRowsSource(WrappedSource):
    """WeightSource of a checkpoint in which the rows of two of the model's matrices alternate in one, as one with both.
    A checkpoint without such matrices is unchanged.

    alternating: CheckpointNames.alternating. Raises ModelFileError for an odd number of rows, and for a matrix that the
    checkpoint has twice.
    """

    def __init__(self, source: WeightSource, alternating: Mapping[str, tuple[str, str]]):
        super().__init__(source)
        # The model's name -> the stored one, and which of two rows it has; the stored name and None for all rows.
        self._rows: dict[str, tuple[str, int | None]] = {}
        for name in source.names():
            ends = next(((end, both) for end, both in alternating.items() if name.endswith(end)), None)
            if ends is not None and (source.shape(name) or (1,))[0] % 2:
                raise fault_in(source, name, f"must have an even number of rows, got {source.shape(name)}")
            both = (
                {name: None} if ends is None else {name.removesuffix(ends[0]) + end: i for i, end in enumerate(ends[1])}
            )
            if twice := sorted(both.keys() & self._rows.keys()):
                raise fault_in(source, name, f"stands for {twice[0]}, as does {stored_names(self, twice[0])[0]}")
            self._rows |= {own: (name, index) for own, index in both.items()}

    def names(self) -> Iterable[str]:
        return self._rows.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, index = self._rows[name]
        shape = self._source.shape(stored)
        return shape if index is None else (shape[0] // 2, *shape[1:])

    def held_in(self, name: str) -> tuple[str, ...]:
        return (self._rows[name][0],) if name in self._rows else (name,)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        stored, index = self._rows[name]
        if index is None:
            return self._source.read(stored, rows, columns)
        first, last, _ = rows.indices(self.shape(name)[0])
        return self._source.read(stored, slice(2 * first, 2 * max(first, last)), columns)[index::2]


def _cut(stored: Spans, parts: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Spans]:
    """Return the rows of each of `parts`, by name. stored: rows of tensors, which in order are those of all parts in
    order. shapes: shapes of the parts by name.
    """
    first, spans = 0, dict[str, Spans]()
    for part in parts:
        spans[part] = _overlap(stored, first, first + shapes[part][0])
        first += shapes[part][0]
    return spans


def _overlap(spans: Spans, first: int, last: int) -> Spans:
    """Return rows `first` to `last`, exclusive, of the rows that `spans` are in order; [] for none."""
    found: Spans = []
    for name, own in spans:
        start, stop = own.start + max(first, 0), min(own.start + last, own.stop)
        if start < stop:
            found.append((name, slice(start, stop)))
        first, last = first - (own.stop - own.start), last - (own.stop - own.start)
    return found
