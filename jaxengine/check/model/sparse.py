"""One layer's sparse attention as a separate program: the indexer's selection, and attention to the selected keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.layers.attention.attention import attention_spec, selection_schedule
from jaxengine.models.layers.attention.blocks.head_blocks import block_attention, select_blocks
from jaxengine.models.layers.attention.sparse_mla import positions_of_groups, select_keys, selected_attention
from jaxengine.sharding.layout import MeshLayout


def sparse_attention(
    attention: LayerAttention, mesh: MeshLayout, shape_of: Callable[..., Any], num_tokens: int, dtype: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return (function of one step's sparse attention, its first arguments, queries, as abstract arrays).

    The function takes these, the pool and a RaggedBatch, and returns the attention output. The first arguments are
    queries and weights of the indexer and both parts of the queries; queries of the indexer and of attention where
    blocks of keys are selected. attention: a layer with an indexer. mesh: layout whose share of the heads a device
    has. shape_of: function from (shape, dtype) to an abstract array on the device. num_tokens: number of tokens of the
    step. dtype: dtype of queries.
    """
    index = attention.index
    assert index is not None
    spec = attention_spec(replace(attention, index=None, sinks=False), mesh)

    def schedule_of(kv: Any, batch: Any) -> Any:
        return selection_schedule(batch, num_tokens=num_tokens, page_size=kv.page_size, platform=kv.platform)

    def over_blocks(index_q: Any, q: Any, kv: Any, batch: Any) -> Any:
        """Return the attention output over the blocks of keys that the indexer selects."""
        options: dict[str, Any] = {"count": index.num_blocks, "local": index.local, "schedule": schedule_of(kv, batch)}
        found = select_blocks(index_q, kv, batch, size=index.block or 1, **options)
        return block_attention(q, kv, batch, found, spec=spec, size=index.block or 1)

    def function(index_q: Any, weights: Any, q: Any, q_rest: Any, kv: Any, batch: Any) -> Any:
        """Return the attention output over the keys that the indexer selects."""
        pooling, size = None, index.pool or 1
        if index.pool is not None:
            pooling = jnp.zeros((index.pool, index.head_dim), jnp.float32)
        options: dict[str, Any] = {"count": index.top_k // size, "schedule": schedule_of(kv, batch)}
        found = select_keys(index_q, weights, kv, batch, pooling=pooling, **options)
        found = found if index.pool is None else positions_of_groups(found, batch, size)
        return selected_attention(q, q_rest, kv, batch, found, spec=spec)

    if index.block is not None:
        heads = (spec.num_kv_heads, index.head_dim), (spec.num_q_heads, spec.head_dim)
        return over_blocks, tuple(shape_of((num_tokens, *size), jnp.dtype(dtype)) for size in heads)
    sizes = [(index.num_heads, index.head_dim), (index.num_heads,), *((spec.num_q_heads, x) for x in spec.query_dims)]
    dtypes = dtype, jnp.float32, dtype, dtype
    return function, tuple(
        shape_of((num_tokens, *size), jnp.dtype(each)) for size, each in zip(sizes, dtypes, strict=True)
    )
