"""View of checkpoints that store low-rank adapters of several tasks in addition to each matrix, with one of them added.

    NAME.parametrizations.weight.original   [out, in]                      NAME.weight [out, in]
    NAME.parametrizations.weight.0.lora_A   [tasks, rank, in]
    NAME.parametrizations.weight.0.lora_B   [tasks, out, rank]

or, of a table of embeddings, [tasks, out, rank] and [tasks, rank, in], as jinaai/jina-embeddings-v3 has them (Sturua et
al. 2024, arXiv:2409.10173).
"""

from __future__ import annotations

import numpy as np

from jaxengine.models.params.source import WHOLE, WeightSource
from jaxengine.models.params.stored_names import fault_in
from jaxengine.models.weights.views.renamed import NamedSource

_MIDDLE = ".parametrizations.weight."
_ORIGINAL, _A, _B = (f"{_MIDDLE}{end}" for end in ("original", "0.lora_A", "0.lora_B"))


class AdaptedSource(NamedSource):
    """WeightSource of a checkpoint with adapters of several tasks as one without adapters.

    adaptation: (number of a task, factor of its product), which is added to each matrix in float32 and rounded to the
    matrix's dtype; None to add none. Raises ModelFileError for adapters that do not fit their matrix, or lack the task,
    and if two tensors get one name.
    """

    def __init__(self, source: WeightSource, adaptation: tuple[int, float] | None):
        super().__init__(source, self._plain)
        self._adaptation, names = adaptation, set(source.names())
        for name in self._stored.values():
            if name.endswith(_ORIGINAL) and adaptation is not None:
                self._check(name.removesuffix(_ORIGINAL), names, adaptation[0])

    def _check(self, module: str, names: set[str], task: int) -> None:
        """Raise ModelFileError unless `names` has both adapter matrices of `module`, and they fit its matrix and have
        the task.
        """
        if missing := {module + _A, module + _B} - names:
            raise fault_in(self._source, min(missing), "is missing")
        first, second = (self._source.shape(name) for name in self._factors(module))
        shape = self._source.shape(module + _ORIGINAL)
        fits = len(first) == len(second) == 3 and (first[1], second[2], first[2]) == (*shape, second[1])
        if not fits or not task < min(first[0], second[0]):
            text = f"must be adapters of {task + 1} tasks or more for a matrix {shape}, got {first} and {second}"
            raise fault_in(self._source, module + _A, text)

    def _factors(self, module: str) -> tuple[str, str]:
        """Return the checkpoint's names of the two factors of a module's adapters, first [tasks, out, rank], then
        [tasks, rank, in]. Those of a table, a module whose name ends with "_embeddings", are stored the other way
        round. Neither is looked up.
        """
        is_table = module.endswith("_embeddings")
        return (module + _A, module + _B) if is_table else (module + _B, module + _A)

    @staticmethod
    def _plain(name: str) -> str | None:
        """Return the name that the stored tensor `name` has without adapters; None for a part of an adapter."""
        if name.endswith((_A, _B)):
            return None
        return name.removesuffix(_ORIGINAL) + ".weight" if name.endswith(_ORIGINAL) else name

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        stored = self._stored[name]
        values = self._source.read(stored, rows, columns)
        if self._adaptation is None or not stored.endswith(_ORIGINAL):
            return values
        task, scale = self._adaptation
        one = slice(task, task + 1)
        first, second = (self._source.read(each, one)[0] for each in self._factors(stored.removesuffix(_ORIGINAL)))
        added = first[rows].astype(np.float32) @ second[:, columns].astype(np.float32)
        return (values.astype(np.float32) + scale * added).astype(values.dtype)
