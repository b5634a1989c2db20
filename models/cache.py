"""Cache of a model: groups of layers, the size of a group's page, and the pool of all pages.

Layers that keep keys for the same tokens (all tokens, or those of a window) form a group with its own page table. All
groups take pages from one pool. A page holds the keys and values of `page_size` tokens in the layers of one group. Page
p of layer number i of any group is in row i * pages + p of the pool, so groups can exchange pages. If layers differ in
heads or head sizes, a row has room for the widest layer, and several narrow layers share a row (`LayerLocation`). CPUs
and GPUs read a layer's pages through a view of the same bytes in which every row is split into several. On TPUs, whose
tiles allow no such view, layers are side by side in the lanes of a row.

A layer that attends to another layer's keys and values has no pages (LayerAttention.kv_source). Layers with a recurrent
state have arrays with a row for each slot instead of pages. A quantised pool has scales for every layer with pages:
k_scale and v_scale, f32[layers, K], have a row for each layer in order, and a layer gets the pool with its own row
(`of_layer`). Scales of single tokens are in the pages.

`platform` is the one whose kernels read the pool, a name in jaxengine.pallas_kernels.registry (see `platform_of`).
Sizes are those of one device. On a mesh every replica has its own pages, and each of its devices holds some heads of
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxengine.models.config.state import StateArray
from jaxengine.pallas_kernels.cards import plain_cards
from jaxengine.pallas_kernels.kv.pages import (
    KVPages,
    KVSpec,
    alloc,
    has_head_scales,
    largest,
    page_bytes,
    partition_spec,
    pool_shape,
)
from jaxengine.pallas_kernels.registry import (
    NATIVE_LIBRARY,
    NATIVE_ROOMS,
    SEQUENCES,
    TOKEN_ROWS,
    block_profile,
    kernel_modules,
    layout_of,
    native_code,
    platform_of,
    product_platform_of,
)
from jaxengine.pallas_kernels.state.rows import StateRows
from jaxengine.sharding.layout import RULES
from jaxengine.sharding.rules import logical_to_spec, part_shape, whole_shape

__all__ = [
    "Cache",
    "KVPages",
    "KVSpec",
    "NATIVE_LIBRARY",
    "NATIVE_ROOMS",
    "Paged",
    "State",
    "StateRows",
    "abstract_kv",
    "block_profile",
    "as_stored",
    "as_viewed",
    "device_kv",
    "group_layers",
    "kernel_modules",
    "native_code",
    "kv_partition",
    "largest_of_layer",
    "layer_locations",
    "num_pages_of",
    "rows_per_page",
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
    """Cache group of layers that share a page table.

    Attributes:
      layers: numbers in the whole model of the layers in a stage, ascending.
      window: number of tokens, including its own, that a token attends to; None for all. Earlier pages are freed.
      specs: shape of one page of each of these layers.
      nothing: if no layer of the stage has pages, a substitute page with as many tokens as other pages and one number
        per token, otherwise None. Page ids then only identify pieces of prefixes and take almost no memory.
    """

    layers: tuple[int, ...]
    window: int | None
    specs: tuple[KVSpec, ...]
    nothing: KVSpec | None = None


class LayerLocation(NamedTuple):
    """Location of one layer's pages in the pool of a stage.

    Attributes:
      spec: shape of one page of the layer.
      row: page p of the layer is in row `row * pages + p` of the pool.
      parts: number of layers, all with this spec, that share a row; 1 for a layer that fills it.
      part: index of this layer among them.
    """

    spec: KVSpec
    row: int
    parts: int
    part: int


@dataclass(frozen=True)
class State:
    """Cache group of layers that keep a recurrent state. Each sequence has a row in each of the arrays.

    Attributes:
      layers: numbers in the whole model of the layers in a stage, ascending.
      arrays: shape of a row of each array on one device.
    """

    layers: tuple[int, ...]
    arrays: tuple[StateArray, ...]


class Cache(NamedTuple):
    """Memory that a model with State layers keeps between steps. Other models only have the pool.

    Attributes:
      kv: the pool.
      states: for each State layer of the stage, in order, its arrays [rows, ...].
    """

    kv: KVPages
    states: tuple[tuple[jax.Array, ...], ...]


def paged_groups(groups: Sequence[Paged | State]) -> list[Paged]:
    """Return the groups with pages, in order."""
    return [group for group in groups if isinstance(group, Paged)]


def state_rows(groups: Sequence[Paged | State], num_rows: int) -> tuple[tuple[jax.Array, ...], ...]:
    """Return new arrays of zeros [num_rows, ...] for Cache.states of one device."""
    return tuple(
        tuple(jnp.zeros((num_rows, *array.shape), array.dtype) for array in arrays) for arrays in state_arrays(groups)
    )


def state_arrays(groups: Sequence[Paged | State]) -> list[tuple[StateArray, ...]]:
    """Return the descriptions of the arrays of each State layer of this stage, in the layers' order."""
    arrays = {layer: group.arrays for group in groups if isinstance(group, State) for layer in group.layers}
    return [arrays[layer] for layer in sorted(arrays)]


def group_layers(
    windows: Sequence[int | None], widths: Sequence[int] | None = None, *, hybrid: bool = True
) -> list[tuple[int | None, tuple[int, ...]]]:
    """Return the cache groups of layers, each as (window, indices of its layers), with windows in the order of
    `windows`.

    windows: the window of each layer, None for all keys; not empty unless `hybrid` is False. widths: elements of a
    token in each layer; None if all are equal.

    Layers with the same window are dealt out to groups of at most n layers, so that every pipeline stage has a similar
    share of each group. n is chosen such that few rows of the groups' pages stay empty and few groups are needed. In n
    a layer of the greatest width counts as 1, and a narrower one by its share of that width. If all layers have the
    same window, there is one group. If `hybrid` is False, all layers form one group that keeps all keys.
    """
    if not hybrid:
        return [(None, tuple(range(len(windows))))]
    widths = widths or [1] * len(windows)
    unit = math.lcm(*widths)
    kinds = {window: [layer for layer, each in enumerate(windows) if each == window] for window in windows}
    counts = {window: _num_rows([unit // widths[layer] for layer in layers]) for window, layers in kinds.items()}
    total = sum(counts.values())

    def cost(size: int) -> float:
        """Return the cost of groups of at most `size` layers: the number of empty pool rows, plus a penalty for each
        group.
        """
        groups = sum(-(-count // size) for count in counts.values())
        return groups * size - total + 0.02 * groups * math.sqrt(len(windows))

    size = min(range(1, max(counts.values()) + 1), key=cost)
    return [
        (window, tuple(layers[first :: -(-counts[window] // size)]))
        for window, layers in kinds.items()
        for first in range(-(-counts[window] // size))
    ]


def _num_rows(parts: Sequence[int]) -> int:
    """Return the number of pool rows that layers fill. parts: for each layer, how many layers of its width share a
    row.
    """
    return sum(-(-parts.count(each) // each) for each in set(parts))


def _specs(groups: Sequence[Paged | State]) -> dict[KVSpec, int]:
    """Return the distinct page shapes of this stage's layers, each with the number of its layers that share a pool row.

    A row has the least common multiple of their elements per token. {} if no layer has pages. Raises ValueError if
    pages differ and have scales of tokens.
    """
    specs = list(dict.fromkeys(spec for group in paged_groups(groups) for spec in group.specs))
    if len(specs) > 1 and any(spec.token_scales for spec in specs):
        raise ValueError("layers whose pages differ in size cannot have scales of tokens")
    width = math.lcm(*(_token_elements(spec) for spec in specs))
    return {spec: width // _token_elements(spec) for spec in specs}


def _token_elements(spec: KVSpec) -> int:
    """Return the number of elements of a token's keys and values together in one layer."""
    return spec.num_kv_heads * spec.token_width


def layer_locations(groups: Sequence[Paged | State]) -> dict[int, LayerLocation]:
    """Return the location in the pool of each layer with pages in this stage, by its number in the model. Each group
    counts rows from 0, those of one page shape after the other. Raises ValueError if pages differ and have scales of
    tokens.
    """
    locations, specs = {}, _specs(groups)
    for group in paged_groups(groups):
        row = 0
        for spec in dict.fromkeys(group.specs):
            layers = [layer for layer, each in zip(group.layers, group.specs, strict=True) if each == spec]
            parts = specs[spec]
            for index, layer in enumerate(layers):
                locations[layer] = LayerLocation(spec, row + index // parts, parts, index % parts)
            row += -(-len(layers) // parts)
    return locations


def rows_per_page(groups: Sequence[Paged | State]) -> int:
    """Return the number of pool rows that a page takes, at least 1. These are the rows that the largest group fills:
    its number of layers if all layers have equal pages. Raises ValueError if pages differ and have scales of tokens.
    """
    return max([1, *(1 + location.row for location in layer_locations(groups).values())])


def pool_spec(groups: Sequence[Paged | State], num_pages: int) -> KVSpec:
    """Return the spec of one device's pool that holds `num_pages` pages of any group. The spec's own num_pages is the
    number of the pool's rows, a multiple of that.

    If no layer has pages, it is the first group's Paged.nothing, whatever `num_pages`. If pages differ, its rows have
    one KV head that is wide enough for all layers. Raises ValueError if pages differ and have scales of tokens.
    """
    if not (specs := _specs(groups)):
        return next(group.nothing for group in paged_groups(groups) if group.nothing is not None)
    (spec, parts), *others = specs.items()
    size = rows_per_page(groups) * num_pages
    if not others:
        return replace(spec, num_pages=size)
    width = parts * _token_elements(spec)
    sizes = {"head_dim": width - width // 2, "v_head_dim": width // 2, "values_in_keys": False, "aligned_values": False}
    return replace(spec, num_pages=size, num_kv_heads=1, **sizes)


def num_pages_of(kv: KVPages, groups: Sequence[Paged | State]) -> int:
    """Return how many pages the pool `kv` of these groups has on one device. Raises ValueError if its number of rows is
    not a multiple of the rows of a page.
    """
    num_pages, rest = divmod(kv.num_pages, rows_per_page(groups))
    if rest:
        raise ValueError(f"num_pages must be a multiple of {rows_per_page(groups)} layers, got {kv.num_pages}")
    return num_pages


def page_bytes_of_group(groups: Sequence[Paged | State], *, platform: str) -> int:
    """Return the bytes of a page on one device, in all layers of its group; 0 if no layer of this stage has pages.
    platform: the platform whose layout the page has. Raises ValueError if pages differ and have scales of tokens.
    """
    return page_bytes(pool_spec(groups, 1), layout_of(platform)) * rows_per_page(groups) if _specs(groups) else 0


def kv_partition(kv: KVPages) -> KVPages:
    """Return the pool with a PartitionSpec for each array. Pages are split over replicas, and heads, also of scales,
    over the devices of a replica.
    """
    heads = logical_to_spec((None, "kv_heads"))
    data = partition_spec(kv.layout, head_axis=RULES["kv_heads"], data_axis=RULES["pages"])
    k_scale, v_scale = (None if scale is None else heads for scale in (kv.k_scale, kv.v_scale))
    return replace(kv, data=data, k_scale=k_scale, v_scale=v_scale)


def abstract_kv(groups: Sequence[Paged | State], num_pages: int, *, platform: str, mesh: Mesh) -> KVPages:
    """Return the pool over all devices of the mesh as sharded ShapeDtypeStructs, without allocating it. Its `spec` is
    that of one device. If the dtype needs head scales, the pool has them for all layers with pages in this stage.

    num_pages: pages in each replica. platform: the platform whose kernels read the pool. Raises ValueError for such a
    dtype if layers differ in KV heads, and if pages differ and have scales of tokens.
    """
    locations, pool = layer_locations(groups), pool_spec(groups, num_pages)
    heads = {each.num_kv_heads for each in _specs(groups)} or {pool.num_kv_heads}
    if len(heads) > 1 and has_head_scales(pool):
        raise ValueError(f"layers that differ in kv heads cannot share a pool of {pool.dtype}, which has their scales")
    kv = jax.eval_shape(lambda: _pool(pool, platform, (len(locations), max(heads))))

    def of_all_devices(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        """Return the shape over all devices of an array that is sharded by `spec`. leaf: its shape on one device."""
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(whole_shape(leaf.shape, sharding), leaf.dtype, sharding=sharding)

    return jax.tree.map(of_all_devices, kv, kv_partition(kv))


def device_kv(shapes: KVPages) -> KVPages:
    """Return one device's part of the pool that `abstract_kv` describes: new arrays of zeros, with head scales of 1."""
    return _pool(shapes.spec, shapes.platform, (0, 0) if shapes.k_scale is None else part_shape(shapes.k_scale))


def of_layer(kv: KVPages, location: LayerLocation, index: int) -> KVPages:
    """Return the pool with the spec and the scales of one layer. Its data array is unchanged; `as_viewed` gives it the
    layer's shape. Of a layer that shares rows, num_pages counts parts of rows, or on TPUs rows, of which `lanes` are
    the layer's.

    location: where the layer's pages are. index: index of the layer among this stage's layers with pages. Raises
    ValueError on TPUs for a layer that shares rows and whose tokens do not fill whole tiles of 128 elements.
    """
    k_scale, v_scale = (None if scale is None else scale[index] for scale in (kv.k_scale, kv.v_scale))
    scaled = replace(kv, k_scale=k_scale, v_scale=v_scale)
    if not _differs(kv, location):
        return scaled
    if kv.layout == TOKEN_ROWS:
        lanes = _own_lanes(location)
        first = location.part * lanes
        return replace(scaled, spec=replace(location.spec, num_pages=kv.num_pages), lanes=(first, first + lanes))
    return replace(scaled, spec=replace(location.spec, num_pages=kv.num_pages * location.parts))


def _own_lanes(location: LayerLocation) -> int:
    """Return how many lanes of a row a layer takes on a TPU. Raises ValueError if its tokens do not fill whole tiles of
    128 elements.
    """
    lanes, elements = pool_shape(location.spec, TOKEN_ROWS)[2], _token_elements(location.spec)
    if lanes != elements:
        raise ValueError(
            "layers whose pages differ in size need tokens that fill whole tiles of 128 elements on TPUs (keys and "
            f"values of all KV heads), got {elements} elements in {lanes}"
        )
    return lanes


def _differs(kv: KVPages, location: LayerLocation) -> bool:
    """Return whether the layer's pages have a different shape from the pool's rows."""
    return replace(location.spec, num_pages=kv.num_pages) != kv.spec


def first_page(kv: KVPages, location: LayerLocation, num_pages: int) -> int:
    """Return the row of the layer's page 0 in the layer's view of the pool. Page p is `row_step` * p rows later.
    num_pages: number of pages in the pool.
    """
    row = location.row * num_pages
    return row if row_step(kv, location) == 1 else row * location.parts + location.part


def row_step(kv: KVPages, location: LayerLocation) -> int:
    """Return the distance in rows between successive pages of a layer, in the layer's view of the pool."""
    return 1 if kv.layout in (TOKEN_ROWS, SEQUENCES) else location.parts


def as_viewed(kv: Any) -> Any:
    """Return a pool, a result of `of_layer`, with its data reshaped to the layer's pages; unchanged for a pool in the
    layout TOKEN_ROWS or SEQUENCES. In a tuple, each element is treated so; anything else is returned unchanged.
    """
    if type(kv) is tuple:
        return tuple(as_viewed(each) for each in kv)
    if not isinstance(kv, KVPages) or kv.layout in (TOKEN_ROWS, SEQUENCES):
        return kv
    shape = pool_shape(kv.spec, kv.layout)
    return kv if kv.data.shape == shape else replace(kv, data=kv.data.reshape(shape))


def as_stored(kv: Any, like: Any) -> Any:
    """Undo `as_viewed`: return the pool with its data reshaped to that of the pool `like`. In a tuple, each element is
    treated so; a pool in the layout SEQUENCES, and anything but a pool, is returned unchanged.
    """
    if type(kv) is tuple:
        return tuple(as_stored(each, its) for each, its in zip(kv, like, strict=True))
    if not isinstance(kv, KVPages) or kv.layout == SEQUENCES or kv.data.shape == like.data.shape:
        return kv
    return replace(kv, data=kv.data.reshape(like.data.shape))


def largest_of_layer(kv: KVPages, location: LayerLocation, num_pages: int) -> tuple[jax.Array, jax.Array | None]:
    """Return the largest magnitudes (jaxengine.pallas_kernels.kv.pages.largest) of keys and of values in one layer's
    pages, each f32[K]; None for values that are part of the keys. num_pages: number of pages in the pool.

    Raises ValueError for a quantised pool, and on TPUs for a layer that shares rows and whose tokens do not fill whole
    tiles of 128 elements.
    """
    first = jnp.int32(location.row * num_pages)
    if not _differs(kv, location):
        return largest(kv, first, num_pages)
    rows = lax.dynamic_slice_in_dim(kv.data, first, num_pages)
    shape = pool_shape(replace(location.spec, num_pages=num_pages), kv.layout)
    if kv.layout == TOKEN_ROWS:
        first = location.part * _own_lanes(location)
        rows = lax.slice_in_dim(rows, first, first + shape[2], axis=2)
    else:
        rows = rows.reshape(num_pages, location.parts, *shape[1:])[:, location.part]
    return largest(replace(kv, data=rows, spec=replace(location.spec, num_pages=num_pages)), jnp.int32(0), num_pages)


def _pool(spec: KVSpec, platform: str, scales: tuple[int, ...]) -> KVPages:
    """Return a new pool of zeros with this spec for a platform. If the dtype has head scales, they are 1. scales: their
    shape, (number of layers with pages, KV heads).
    """
    kv = alloc(spec, platform=platform)
    if not has_head_scales(spec):
        return kv
    ones = jnp.ones(scales, jnp.float32)
    return replace(kv, k_scale=ones, v_scale=None if kv.v_scale is None else ones)
