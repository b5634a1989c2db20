"""View of checkpoints that store the two halves of the latent projection separately, as GGUF files do, as one tensor.

    NAME.k_b_proj.weight [H, R, K], NAME.v_b_proj.weight [H, V, R]     NAME.kv_b_proj.weight [H * (K + V), R]

H heads of K elements of keys without rope and V of values, latents of R.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource
from jaxengine.models.params.stored_names import fault_in

_KEYS, _VALUES, _BOTH = ".k_b_proj.weight", ".v_b_proj.weight", ".kv_b_proj.weight"


class SplitLatentSource(WrappedSource):
    """WeightSource of a checkpoint with split latent projections as one with joined projections; a checkpoint without
    such tensors is unchanged. Values are converted to the dtype of keys.

    Raises ModelFileError for keys without values, and for shapes that do not match.
    """

    def __init__(self, source: WeightSource):
        super().__init__(source)
        self._names = dict.fromkeys(source.names())
        self._split: dict[str, tuple[int, ...]] = {}
        for name in [name for name in self._names if name.endswith(_KEYS)]:
            stem = name.removesuffix(_KEYS)
            keys = tuple(source.shape(name))
            values = tuple(source.shape(stem + _VALUES)) if stem + _VALUES in self._names else ()
            if len(keys) != 3 or len(values) != 3 or keys[:2] != (values[0], values[2]) or stem + _BOTH in self._names:
                text = f"must have keys [H, R, K] and values [H, V, R] of the same heads, got {keys} and {values}"
                raise fault_in(source, name, text)
            self._split[stem + _BOTH] = (keys[0] * (keys[2] + values[1]), keys[1])
            del self._names[name], self._names[stem + _VALUES]
            self._names[stem + _BOTH] = None

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._split.get(name) or self._source.shape(name)

    def held_in(self, name: str) -> tuple[str, ...]:
        stem = name.removesuffix(_BOTH)
        return (stem + _KEYS, stem + _VALUES) if name in self._split else (name,)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        if name not in self._split:
            return self._source.read(name, rows, columns)
        stem = name.removesuffix(_BOTH)
        of_head = self._split[name][0] // self._source.shape(stem + _KEYS)[0]
        first, last, _ = rows.indices(self._split[name][0])
        heads = slice(first // of_head, -(-last // of_head))
        keys = self._source.read(stem + _KEYS, heads, columns)
        values = self._source.read(stem + _VALUES, heads)[:, :, columns]
        together = np.concatenate([keys.swapaxes(1, 2), values.astype(keys.dtype)], axis=1)
        start = heads.start * of_head
        return together.reshape(-1, together.shape[2])[first - start : last - start]
