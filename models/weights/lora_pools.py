"""From an adapter's matrices to what its slot of each pool holds, and pools that hold none yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.config.lora import LoraSpec
from models.lora import DeclaredPool, PoolArray, declared_pools
from models.weights.declare import declared_params
from models.weights.parts import format_of, source_row
from sharding.rules import named_sharding

# Of one module: A [r, in] and B [out, r], scaled, as a checkpoint has them.
Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]

POOLS = "adapters of"  # what names of pools begin with


@dataclass(frozen=True)
class AdapterTargets:
    """What an adapter may change of a model.

    Attributes:
      shapes: (inputs, outputs) of each checkpoint module that takes adapters.
      others: modules that the model has and that take none.
      prefixes: beginnings of the checkpoint's names, and what the model says instead.
    """

    shapes: Mapping[str, tuple[int, int]]
    others: frozenset[str]
    prefixes: tuple[tuple[str, str], ...]


def targets_of(models: Iterable[Any]) -> AdapterTargets:
    """Those of the stages of one model, abstract or real."""
    shapes: dict[str, tuple[int, int]] = {}
    tensors: set[str] = set()
    prefixes: tuple[tuple[str, str], ...] = ()
    for model in models:
        prefixes = model.checkpoint_names.prefixes
        for pool in declared_pools(model):
            if pool.decl.part is None:
                for source in pool.decl.sources:
                    shapes[source.name] = pool.shape[1], source.tensor_rows or source.rows
        for param in declared_params(model):
            tensors |= {source.name.rpartition(".")[0] for source in param.decl.sources}
    return AdapterTargets(shapes, frozenset(tensors - shapes.keys()), prefixes)


def with_pools(model: Any, params: nnx.State, mesh: Mesh | None) -> nnx.State:
    """The model's state: loaded weights, and beside them pools of zeros on the mesh, if it has any."""
    loaded = dict(nnx.to_flat_state(params))
    state = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(variable, PoolArray):
            like, axes = variable.get_value(), variable.get_metadata()["decl"].axes
            place = None if mesh is None else named_sharding(mesh, axes)
            state.append((path, variable.replace(jax.device_put(np.zeros(like.shape, like.dtype), place))))
        else:
            state.append((path, loaded[path]))
    return nnx.from_flat_state(state)


def abstract_leaves(model: Any, mesh: Mesh) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Name and shape, with sharding and layout, of each leaf of an abstract model's state on the mesh: its weights, and
    among them the pools of adapters, if it has any."""
    pools, params, leaves = {pool.index: pool for pool in declared_pools(model)}, declared_params(model), []
    for index in range(len(nnx.to_flat_state(nnx.state(model)))):
        if (pool := pools.get(index)) is not None:
            name = f"{POOLS} {', '.join(pool.decl.modules)}"
            leaf = jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=named_sharding(mesh, pool.decl.axes))
        else:
            param = next(params)
            stored = format_of(param.decl, named_sharding(mesh, param.decl.axes))
            name, leaf = param.name, jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=stored)
        leaves.append((name, leaf))
    return leaves


def slot_shape(pool: DeclaredPool, spec: LoraSpec) -> tuple[int, ...]:
    """Shape of what one adapter has of a pool: [modules * rank, in] of a, [rank, out] of b."""
    if pool.decl.part is None:
        return len(pool.decl.modules) * spec.max_lora_rank, pool.shape[1]
    return spec.max_lora_rank, pool.shape[1]


def slot_values(pool: DeclaredPool, spec: LoraSpec, matrices: Matrices) -> np.ndarray:
    """What one adapter has of a pool, in its dtype; zeros for modules that the adapter leaves alone."""
    values, rank = np.zeros(slot_shape(pool, spec), pool.dtype), spec.max_lora_rank
    if pool.decl.part is None:
        for index, module in enumerate(pool.decl.modules):
            if module in matrices:
                a = matrices[module][0]
                values[index * rank : index * rank + len(a)] = a
        return values
    source = pool.decl.sources[pool.decl.part]
    if source.name in matrices:
        b = matrices[source.name][1]
        rows = source_row(source, np.arange(source.rows * source.repeat))
        values[: b.shape[1], : len(rows)] = b[rows].T
    return values
