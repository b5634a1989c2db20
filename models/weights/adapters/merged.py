"""View of a checkpoint with an adapter merged into its weights."""

from __future__ import annotations

import numpy as np

from jaxengine.models.params.source import WHOLE, WeightSource, WrappedSource
from jaxengine.models.weights.adapters.folder import AdapterWeights
from jaxengine.models.weights.adapters.pools import AdapterTargets
from jaxengine.models.weights.views.renamed import RenamedSource
from jaxengine.models.weights.views.stacked import of_shapes


class MergedSource(WrappedSource):
    """WeightSource of a checkpoint in which each matrix W that an adapter changes is W + B A, in float32, computed for
    each part as it is read. Other tensors are unchanged.

    hidden_size: the model's, which determines the orientation of stacks of experts.
    """

    def __init__(self, source: WeightSource, adapter: AdapterWeights, targets: AdapterTargets, hidden_size: int):
        super().__init__(source)
        self._matrices = adapter.matrices
        names = {stored: targets.names.renamed(stored) for stored in source.names()}
        modules = {stored: name.removesuffix(".weight") for stored, name in names.items()}
        self._changed = {stored: module for stored, module in modules.items() if module in self._matrices}
        layers = {stored: name.rpartition(".") for stored, name in names.items()}
        self._stacks = {
            stored: (experts, experts.joined[part])
            for stored, (layer, _, part) in layers.items()
            if (experts := targets.experts.get(layer)) is not None and part in experts.joined
        }
        self._transposed = {stored for stored, name in names.items() if name.endswith(targets.names.transposed)}
        renamed = RenamedSource(source, targets.names)
        self._stacked = of_shapes(targets.names.stacked_experts, renamed, hidden_size)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return these rows and columns of a tensor. If the adapter changes the tensor, its change is added and the
        result is float32; otherwise it has the tensor's dtype.
        """
        array = self._source.read(name, rows, columns)
        if name in self._stacks:
            return array.astype(np.float32) + self._of_stack(name, rows, columns)
        if name not in self._changed:
            return array
        a, b = (each.astype(np.float32) for each in self._matrices[self._changed[name]])
        change = (b[columns] @ a[:, rows]).T if name in self._transposed else b[rows] @ a[:, columns]
        return array.astype(np.float32) + change

    def _of_stack(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Return the adapter's change of a stack of experts' matrices, f32 [experts, ., .], in the stack's orientation,
        [out, in] or [in, out] each.

        rows: slice of the experts. columns: slice of the stack's second axis.
        """
        experts, modules = self._stacks[name]
        count, first, second = self._source.shape(name)
        added = []
        for expert in range(count)[rows]:
            change = np.zeros((first, second) if self._stacked.out_first else (second, first), np.float32)
            parts = experts.rows_of_parts(len(modules), len(change))
            for module, own in zip(modules, parts, strict=True):
                if (pair := self._matrices.get(module.replace("{expert}", str(expert)))) is not None:
                    change[own] = pair[1].astype(np.float32) @ pair[0].astype(np.float32)
            added.append((change if self._stacked.out_first else change.T)[columns])
        return np.stack(added)
