"""Views of a checkpoint under other names for its tensors, such as its model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

from jaxengine.models.config.altup import BLOCK, LISTED, SharedBlocks
from jaxengine.models.params.source import (
    INNER,
    MODEL,
    WHOLE,
    CheckpointNames,
    NextLayer,
    WeightSource,
    WrappedSource,
    absent_names,
    stored_names,
)
from jaxengine.models.params.stored_names import fault_in


def is_of_block(name: str) -> bool:
    """Return whether a tensor belongs to a transformer block of Zamba 2."""
    return BLOCK.match(name) is not None


class NamedSource(WrappedSource):
    """WeightSource of a checkpoint under other names.

    name_of: returns the name of a tensor, given the checkpoint's; None to leave the tensor out. Raises ModelFileError
    if two tensors get one name, and the errors of `name_of`.
    """

    def __init__(self, source: WeightSource, name_of: Callable[[str], str | None]):
        super().__init__(source)
        self._stored: dict[str, str] = {}
        for stored in source.names():
            if (name := name_of(stored)) is None:
                continue
            if name in self._stored:
                text = f"stands for {name}, as does {stored_names(source, self._stored[name])[0]}"
                raise fault_in(source, stored, text)
            self._stored[name] = stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored[name])

    def held_in(self, name: str) -> tuple[str, ...]:
        return (self._stored.get(name, name),)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        return self._source.read(self._stored[name], rows, columns)


class NextTokenSource(NamedSource):
    """View of a model's checkpoint with only the tensors of its next-token layer, without those that the model lends
    it, as tensors of layer `number` and, if it is several, those after it. layer: CheckpointNames.next_layer.
    """

    def __init__(self, source: WeightSource, number: int, layer: NextLayer):
        places, pairs = layer.places(number), layer.placed(number)

        def name_of(stored: str) -> str | None:
            name = next((new + stored.removeprefix(old) for old, new in pairs if stored.startswith(old)), stored)
            own = next((name.removeprefix(place) for place in places if name.startswith(place)), None)
            if own is None or (own.startswith(("embed_tokens.", "shared_head.")) and not own.startswith(layer.norm)):
                return None
            return name

        super().__init__(source, name_of)


class RenamedSource(NamedSource):
    """WeightSource of a checkpoint under the model's names and shapes, as its CheckpointNames define them. Unused
    tensors and known constants are left out.

    Raises ModelFileError if two tensors get one name, or if a constant has another value.
    """

    def __init__(self, source: WeightSource, names: CheckpointNames):
        self._names = names

        def name_of(stored: str) -> str | None:
            is_left_out = names.is_unused(stored) or self._is_constant(stored)
            return None if is_left_out else names.renamed(stored)

        super().__init__(source, name_of)

    def _is_constant(self, stored: str) -> bool:
        """Return whether a tensor is a known constant, which no model reads. Reads it to compare. Raises ModelFileError
        if it has another value.
        """
        names = self._names
        known = {**names.constants, **names.filled}.items()
        value = next((value for end, value in known if stored.endswith(end)), None)
        if value is None:
            return False
        held = self._source.read(stored).astype(np.float32)
        is_one = held.size == 1 or (held.size and stored.endswith(tuple(names.filled)))
        if not is_one or not np.isin(held, (np.float32(value), np.float32(ml_dtypes.bfloat16(value)))).all():
            raise fault_in(self._source, stored, f"must hold {value} and nothing else, got {held.ravel()[:4]}")
        return True

    def absent_names(self, name: str) -> tuple[str, ...]:
        forms = self._names.stored_forms(name) or (name,)
        return tuple(each for form in forms for each in absent_names(self._source, form) or (form,))

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of the tensor with the model's name `name`. Raises KeyError for an unknown
        one.
        """
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(self._stored[name])
        if self._is_raveled(name, shape):
            return (math.prod(shape),)
        if self._is_flattened(name, shape):
            return shape[0], math.prod(shape[1:])
        if self._is_transposed(self._stored[name], shape):
            return shape[::-1]
        return (shape[0], *shape[2:]) if self._is_squeezed(name, shape) else shape

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        stored = self._stored[name]
        if self._is_raveled(name, self._source.shape(stored)):
            return self._source.read(stored).reshape(-1)[rows]
        if self._is_squeezed(name, self._source.shape(stored)):
            return self._source.read(stored, rows)[:, 0, columns]
        if self._is_flattened(name, self._source.shape(stored)):
            whole = self._source.read(stored, rows)
            return whole.reshape(len(whole), math.prod(whole.shape[1:]))[:, columns]
        if self._is_transposed(stored, self._source.shape(stored)):
            return self._source.read(stored, columns, rows).T
        return self._source.read(stored, rows, columns)

    # Whether CheckpointNames requires this conversion for a tensor of this name and shape.

    def _is_raveled(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor is returned with one axis although it is stored with another number of axes."""
        return len(shape) != 1 and name.endswith(self._names.raveled)

    def _is_squeezed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor's second axis, of one entry, is left out."""
        return len(shape) > 2 and shape[1] == 1 and name.endswith(self._names.squeezed)

    def _is_transposed(self, stored: str, shape: tuple[int, ...]) -> bool:
        """Return whether the matrix `stored` is returned transposed. A column is not: it has the bytes of a matrix that
        bitsandbytes has transposed before.
        """
        return len(shape) == 2 and shape[1] != 1 and stored.endswith(self._names.transposed)

    def _is_flattened(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor's axes after the first are joined to one."""
        return len(shape) > 2 and name.endswith(self._names.flattened)


class SharedBlocksSource(NamedSource):
    """WeightSource of a checkpoint of Zamba 2, with the tensors of its blocks under each layer that has the block. If
    blocks are tied, `names` has only the first of these layers; a pipeline stage reads them under its own first one.

    A checkpoint stores a block under that layer, or also under others. Its lists of low-rank products
    (`..._adapter_list`) have one for each layer with a block, whichever; here these are in the layer itself, without
    the list: linear_q_adapter_list.3.0 is linear_q_adapter.0 of the fourth such layer.
    """

    def __init__(self, source: WeightSource, blocks: SharedBlocks):
        super().__init__(source, lambda stored: None if is_of_block(stored) else stored)
        named, self._copies = dict.fromkeys(self._stored), dict[str, list[str]]()
        for found in sorted(filter(None, map(BLOCK.match, source.names())), key=lambda found: int(found[1])):
            stored, layer, name = found[0], int(found[1]), found[2]
            layers = blocks.sharing(layer) or (layer,)
            if (listed := LISTED.search(name)) is not None and int(listed[1]) < len(blocks.layers):
                layers, name = (blocks.layers[int(listed[1])],), LISTED.sub(".", name)
            for each in layers:
                own = f"model.layers.{each}.shared_transformer.{name}"
                if each == layer and not blocks.tied:
                    self._stored[own] = stored
                if self._stored.setdefault(own, stored) != stored and blocks.tied:
                    self._copies.setdefault(own, []).append(stored)
                if each == layers[0] or not blocks.tied:
                    named[own] = None
        self._named = tuple(named)

    def names(self) -> Iterable[str]:
        return self._named

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return a slice of a tensor. Raises ModelFileError if a copy of it, under another layer, has other values."""
        found = super().read(name, rows, columns)
        for copy in self._copies.get(name, ()):
            if not np.array_equal(self._source.read(copy, rows, columns), found):
                other = stored_names(self._source, self._stored[name])[0]
                raise fault_in(self._source, copy, f"differs from {other}, but these layers share one block")
        return found


def with_prefix(source: WeightSource, names: CheckpointNames, heads: Iterable[str] = ()) -> WeightSource:
    """Return a pooling model's checkpoint under names with the common beginning `names.base`, which files without a
    head, saved as *Model, lack. A checkpoint whose names have it is returned unchanged. INNER, with which a retriever's
    names of the model inside it begin, is left out.

    heads: beginnings of further names that are kept.
    """
    if any(name.startswith(INNER) for name in source.names()):
        source = RenamedSource(source, CheckpointNames(prefixes=((INNER, ""),)))
    if any(name.startswith(MODEL) for name in source.names()):
        return source
    known = ("lm_head.", "score.", *heads, *(old for old, _ in names.prefixes))
    return RenamedSource(source, CheckpointNames(prefixes=(*((old, old) for old in known), ("", names.base))))
