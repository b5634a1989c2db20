"""TowerConfig: what an engine must know of the part of a model that sees. Knows nothing of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """What turns patches of pictures into embeddings. A subclass, beside its tower, has the sizes of a family.

    A tower is a flax.nnx module; `tower(patches, columns)` takes P patches f32[P, F] and what is said of each in
    columns i32[C, P], and gives [P / merge, E] in the model's dtype. Several pictures share a call: a column says whose
    a patch is, or all pictures have `unit` patches. Padding behind the last picture is zeros, with -1 in the columns.

    Attributes:
      num_features: F, numbers of a patch.
      columns: their names, C of them.
      merge: patches that become one row.
      unit: a call has a multiple of so many patches; itself a multiple of `merge`.
      attends_both_ways: whether the tokens of a picture see each other, those that follow too. A step then has all of a
        picture's tokens that are not computed yet, or none.
      num_parts: E / D, 1 + the number of layers that add a part of their own.
    """

    num_features: int
    columns: tuple[str, ...]
    merge: int
    unit: int
    num_parts: int = 1
    attends_both_ways: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        """Beginnings of the names, as the model says them, of tensors of the tower that this model does without."""
        return ()

    def make(self, hidden_size: int, build: Any) -> Any:
        """The tower, a flax.nnx module, of a model of this hidden size for a models.build.Build."""
        raise NotImplementedError(f"{type(self).__name__} is no tower of its own")
