"""The KV pool as the engine asks for it: how large a page of all layers is, and the pool itself.

`layout` is the platform whose kernels read the pool: a name of pallas_kernels.registry, see `platform_of`. Sizes are of
one device; on a mesh every rank has pages of its own, and its devices hold their heads of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from models.causal_lm import CausalLM
from pallas_kernels.kv.pages import KVPages, alloc, page_bytes, partition_spec
from pallas_kernels.registry import kernel_modules, platform_of
from sharding.layout import RULES
from sharding.rules import logical_to_spec, whole_shape

__all__ = [
    "KVPages",
    "abstract_kv",
    "kernel_modules",
    "kv_partition",
    "make_kv",
    "page_bytes_all_layers",
    "platform_of",
]


def page_bytes_all_layers(model: CausalLM, page_size: int, dtype: Any, *, layout: str) -> int:
    """Bytes that one page of `page_size` tokens takes on one device, over all layers."""
    return page_bytes(model.kv_spec(1, page_size, dtype), layout) * len(model.stage.layers)


def kv_partition(kv: KVPages) -> KVPages:
    """The pool's PartitionSpecs: pages over ranks, heads over the devices of a rank."""
    heads = None if kv.k_scale is None else logical_to_spec(("kv_heads",))
    data = partition_spec(kv.layout, head_axis=RULES["kv_heads"], data_axis=RULES["pages"])
    return replace(kv, data=data, k_scale=heads, v_scale=heads)


def abstract_kv(
    model: CausalLM, pages_per_layer: int, page_size: int, dtype: Any, *, layout: str, mesh: Mesh
) -> KVPages:
    """The pool's shapes over all devices of the mesh, nothing allocated; its `spec` is that of one device."""
    kv = jax.eval_shape(lambda: alloc(model.kv_spec(pages_per_layer, page_size, dtype), layout=layout))

    def of_all_devices(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(whole_shape(leaf.shape, sharding), leaf.dtype, sharding=sharding)

    return jax.tree.map(of_all_devices, kv, kv_partition(kv))


def make_kv(shapes: KVPages) -> KVPages:
    """The pool of `abstract_kv`, zeroed, each device making its own part; quantised dtypes start with scales of 1."""

    def fill(shape: Any, value: int) -> jax.Array:
        return jax.jit(jnp.full, static_argnums=(0, 1, 2), out_shardings=shape.sharding)(
            shape.shape, value, shape.dtype
        )

    scales = [None if scale is None else fill(scale, 1) for scale in (shapes.k_scale, shapes.v_scale)]
    return replace(shapes, data=fill(shapes.data, 0), k_scale=scales[0], v_scale=scales[1])
