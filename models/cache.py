"""Cache of a model: groups of layers, the size of a group's page, and the pool of all of them.

Layers that keep the same keys, all or those of a window, form a group with a page table of its own. All groups take
pages of one pool: a page holds the keys and values of `page_size` tokens in the layers of one group, and layer number i
of any group finds page p in row i * pages + p. So memory flows between groups, and kernels need not be aware of them.

Layers that keep a state of each sequence have arrays with a row for each slot instead of pages.

A pool of codes has scales for every layer with pages: rows of k_scale and v_scale, f32[layers, K], in the layers'
order. A layer gets the pool with its own row (`of_layer`). Token scales are in the pages.

`layout` is the platform whose kernels read the pool: a name of jaxengine.pallas_kernels.registry, see `platform_of`.
Sizes are of one device; on a mesh every rank has pages of its own, and each of its devices holds some heads of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxengine.models.config.state import StateArray
from jaxengine.pallas_kernels.kv.pages import (
    KVPages,
    KVSpec,
    alloc,
    has_head_scales,
    largest,
    page_bytes,
    partition_spec,
)
from jaxengine.pallas_kernels.registry import (
    block_profile,
    kernel_modules,
    plain_cards,
    platform_of,
    product_platform_of,
)
from jaxengine.pallas_kernels.state.rows import StateRows
from jaxengine.sharding.layout import RULES
from jaxengine.sharding.rules import logical_to_spec, whole_shape

__all__ = [
    "Cache",
    "KVPages",
    "KVSpec",
    "Paged",
    "State",
    "StateRows",
    "abstract_kv",
    "block_profile",
    "device_kv",
    "group_layers",
    "kernel_modules",
    "kv_partition",
    "largest",
    "num_places",
    "of_layer",
    "page_bytes_of_group",
    "paged_groups",
    "plain_cards",
    "platform_of",
    "pool_spec",
    "product_platform_of",
    "state_arrays",
    "state_rows",
]


@dataclass(frozen=True)
class Paged:
    """A cache group: layers that share a page table.

    Attributes:
      layers: layers of a stage, numbered as in the full model, ascending.
      window: keys that a token sees, itself included; None for all. Pages before it are freed.
      spec: shape of one page of one layer.
    """

    layers: tuple[int, ...]
    window: int | None
    spec: KVSpec


@dataclass(frozen=True)
class State:
    """A cache group: layers that keep a row of each of these arrays for a sequence.

    Attributes:
      layers: layers of a stage, numbered as in the full model, ascending.
      arrays: shape of a row of each array on one device.
    """

    layers: tuple[int, ...]
    arrays: tuple[StateArray, ...]


class Cache(NamedTuple):
    """Memory that a model with State layers keeps between steps; other models have the pool alone.

    Attributes:
      kv: the pool.
      states: for each State layer of the stage, in order, its arrays [rows, ...].
    """

    kv: KVPages
    states: tuple[tuple[jax.Array, ...], ...]


def paged_groups(groups: Sequence[Paged | State]) -> list[Paged]:
    """Select the groups with pages."""
    return [group for group in groups if isinstance(group, Paged)]


def state_rows(groups: Sequence[Paged | State], num_rows: int) -> tuple[tuple[jax.Array, ...], ...]:
    """Allocate Cache.states of one device, zeroed; num_rows: rows of each array."""
    return tuple(
        tuple(jnp.zeros((num_rows, *array.shape), array.dtype) for array in arrays) for arrays in state_arrays(groups)
    )


def state_arrays(groups: Sequence[Paged | State]) -> list[tuple[StateArray, ...]]:
    """The arrays of each State layer here, in order; every replica has rows of its own."""
    arrays = {layer: group.arrays for group in groups if isinstance(group, State) for layer in group.layers}
    return [arrays[layer] for layer in sorted(arrays)]


def group_layers(windows: Sequence[int | None], *, hybrid: bool = True) -> list[tuple[int | None, tuple[int, ...]]]:
    """Group layers with these windows (None: all keys): (window, indices of its layers) of each cache group.

    There must be a layer, unless `hybrid` is False.

    Layers of one window are dealt out to groups of at most n layers, one after the other, so that every pipeline stage
    has a similar share of each; n is chosen so that few rows of the groups' pages stay empty, and few groups are needed
    (a page table and a slot mapping each). With one window for all layers there is one group. hybrid: False puts all
    layers into one group that keeps all keys.
    """
    if not hybrid:
        return [(None, tuple(range(len(windows))))]
    kinds = {window: [layer for layer, each in enumerate(windows) if each == window] for window in windows}
    counts = [len(layers) for layers in kinds.values()]

    def cost(size: int) -> float:
        groups = sum(-(-count // size) for count in counts)
        return groups * size - len(windows) + 0.02 * groups * math.sqrt(len(windows))

    size = min(range(1, max(counts) + 1), key=cost)
    return [
        (window, tuple(layers[first :: -(-len(layers) // size)]))
        for window, layers in kinds.items()
        for first in range(-(-len(layers) // size))
    ]


def num_places(groups: Sequence[Paged | State]) -> int:
    """Number of layers that a page holds: those of the largest group, and one in a stage whose layers all have
    states."""
    return max(1, *(len(group.layers) for group in paged_groups(groups)))


def pool_spec(groups: Sequence[Paged | State], num_pages: int) -> KVSpec:
    """Spec of one device's pool that holds `num_pages` pages of any group."""
    return replace(paged_groups(groups)[0].spec, num_pages=num_places(groups) * num_pages)


def page_bytes_of_group(groups: Sequence[Paged | State], *, layout: str) -> int:
    """Bytes of a page on one device, in all layers of its group."""
    return page_bytes(paged_groups(groups)[0].spec, layout) * num_places(groups)


def kv_partition(kv: KVPages) -> KVPages:
    """PartitionSpecs of the pool: pages over ranks, heads over the devices of a rank."""
    heads = logical_to_spec((None, "kv_heads"))
    data = partition_spec(kv.layout, head_axis=RULES["kv_heads"], data_axis=RULES["pages"])
    k_scale, v_scale = (None if scale is None else heads for scale in (kv.k_scale, kv.v_scale))
    return replace(kv, data=data, k_scale=k_scale, v_scale=v_scale)


def abstract_kv(groups: Sequence[Paged | State], num_pages: int, *, layout: str, mesh: Mesh) -> KVPages:
    """Shapes of the pool over all devices of the mesh, nothing allocated; its `spec` is that of one device.

    num_pages: pages of any group that each rank holds. layout: the platform whose kernels read it. Head scales are
    those of all layers with pages here; None where the dtype needs none.
    """
    num_layers = sum(len(group.layers) for group in paged_groups(groups))
    kv = jax.eval_shape(lambda: _pool(pool_spec(groups, num_pages), layout, num_layers))

    def of_all_devices(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(whole_shape(leaf.shape, sharding), leaf.dtype, sharding=sharding)

    return jax.tree.map(of_all_devices, kv, kv_partition(kv))


def device_kv(shapes: KVPages) -> KVPages:
    """Allocate one device's part of the pool of `abstract_kv`, zeroed; head scales start as 1."""
    return _pool(shapes.spec, shapes.layout, 0 if shapes.k_scale is None else shapes.k_scale.shape[0])


def of_layer(kv: KVPages, index: int) -> KVPages:
    """Return the pool with the scales of one layer, given by its index among this stage's layers with pages."""
    k_scale, v_scale = (None if scale is None else scale[index] for scale in (kv.k_scale, kv.v_scale))
    return replace(kv, k_scale=k_scale, v_scale=v_scale)


def _pool(spec: KVSpec, layout: str, num_layers: int) -> KVPages:
    kv = alloc(spec, layout=layout)
    if not has_head_scales(spec):
        return kv
    ones = jnp.ones((num_layers, spec.num_kv_heads), jnp.float32)
    return replace(kv, k_scale=ones, v_scale=None if kv.v_scale is None else ones)
