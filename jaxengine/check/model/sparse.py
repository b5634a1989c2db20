"""One layer's sparse attention as a program of its own: the indexer's selection, and attention to what it selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.layers.attention.attention import attention_spec, selection_schedule
from jaxengine.models.layers.attention.sparse_mla import select_keys, selected_attention
from jaxengine.sharding.layout import MeshLayout


def sparse_attention(
    attention: LayerAttention, mesh: MeshLayout, shape_of: Callable[..., Any], num_tokens: int, dtype: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function (queries and weights of the indexer, both parts of the queries, pool, RaggedBatch) -> output
    of a step of `num_tokens` tokens, and its first four arguments.

    attention: a layer with an indexer. shape_of: function from (shape, dtype) to an abstract array on the device. mesh:
    the layout whose part of the heads a device has. dtype: of queries.
    """
    index = attention.index
    assert index is not None
    spec = attention_spec(replace(attention, index=None), mesh)

    def function(index_q: Any, weights: Any, q: Any, q_rest: Any, kv: Any, batch: Any) -> Any:
        """Select keys by the indexer and attend to them."""
        schedule = selection_schedule(batch, num_tokens=num_tokens, page_size=kv.page_size, platform=kv.platform)
        found = select_keys(index_q, weights, kv, batch, count=index.top_k, schedule=schedule)
        return selected_attention(q, q_rest, kv, batch, found, spec=spec)

    sizes = [(index.num_heads, index.head_dim), (index.num_heads,), *((spec.num_q_heads, x) for x in spec.query_dims)]
    dtypes = dtype, jnp.float32, dtype, dtype
    return function, tuple(
        shape_of((num_tokens, *size), jnp.dtype(each)) for size, each in zip(sizes, dtypes, strict=True)
    )
