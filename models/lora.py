"""Pools of adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): declarations for each matrix that takes adapters.

An adapter adds (x A) B to a product x W. All adapters that a device holds lie in two kinds of arrays, a slot for each,
flat, so that no program copies or gathers them, and with the rows of a slot contiguous, so that one is read alone:

    a  [modules * slots * rank, in]    A transposed: rows of a module, then of a slot, then of a rank
    b  [slots * rank, out]             one for each source of the product, rows of a slot, then of a rank

For the matrices of experts each expert has a pair of its own in each slot, as each expert sees few rows:

    a  [experts, slots, modules * rank, in]    A transposed
    b  [experts, slots, rank, out]

Ranks below the pool's are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from jaxengine.models.params.declare import Source, numbered


@dataclass(frozen=True)
class PoolDecl:
    """Description of a pool's array in addition to shape and dtype. Equal for equal layers, like a ParamDecl.

    Attributes:
      axes: logical axes of the array.
      sources: sources of the full product, with placeholders in their names that `numbered` replaces.
      part: for b, the index of its source; None for a.
      num_experts: number of matrices of a stack, one per expert, with "{expert}" in the sources' names; None for a
        single matrix.
      may_group: whether the product of a single matrix has the grouped form where the platform has one.
    """

    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    part: int | None
    num_experts: int | None = None
    may_group: bool = True

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the checkpoint modules that form the product, without repetition, in the order of a's rows."""
        return modules_of(self.sources)


class PoolArray(nnx.Variable):
    """Variable for an array of adapters' matrices. It is not a weight of the model: loaders and declared_params skip
    it.
    """


@dataclass(frozen=True)
class DeclaredPool:
    """One array of a built model's pools.

    Attributes:
      index: its index among the leaves of the model's state.
      shape, dtype: those of the array.
      decl: its description, with the number of its layer, if it has one, in names.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    decl: PoolDecl


def modules_of(sources: tuple[Source, ...]) -> tuple[str, ...]:
    """Return the names of the modules of these sources, in order and without repetition."""
    return tuple(dict.fromkeys(source.name for source in sources))


def declared_pools(model: Any) -> Iterator[DeclaredPool]:
    """Yield a description of each array of a model's pools, abstract or real, in the order of its state's leaves. Names
    of sources have the layer's number.
    """
    for index, (path, variable) in enumerate(nnx.to_flat_state(nnx.state(model))):
        if not isinstance(variable, PoolArray):
            continue
        layer = model.config.stored_layer(model.stage.layers[path[1]]) if path[0] == "layers" else None
        decl = variable.get_metadata()["decl"]
        sources = tuple(each._replace(name=numbered(each.name, layer)) for each in decl.sources)
        value = variable.get_value()
        yield DeclaredPool(index, value.shape, value.dtype, replace(decl, sources=sources))
