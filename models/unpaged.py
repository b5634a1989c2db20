"""A model over whole sequences, without pages: the modules that serve, and operations that have a gradient.

Rows of tokens may hold several segments, one after the other. Every array is whole: XLA splits it over devices as its
arguments are split, and no layer exchanges anything by itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.models.cache import Cache, StateRows, pool_spec, state_rows
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages, pool_shape
from jaxengine.pallas_kernels.registry import SEQUENCES, UNPAGED, rows_of
from jaxengine.pallas_kernels.runs import run_indexes, run_starts
from jaxengine.sharding.layout import ONE_DEVICE


def check_unpaged(model: CausalLM) -> None:
    """Raise ValueError, with the reason, for a model that `run_unpaged` cannot run or that has no gradient.

    The model must generate, have all layers, be built for one device and without `exact`, attend without keys of
    blocks of tokens, and have plain weights.
    """
    config, build = model.config, model.build
    if config.pooler is not None:
        problem = "is a pooling model, which has no logits"
    elif (model.stage.layers.start, model.stage.layers.stop) != (0, config.num_layers):
        problem = f"has layers {model.stage.layers.start} to {model.stage.layers.stop - 1} of {config.num_layers} only"
    elif build.mesh != ONE_DEVICE:
        problem = f"was built for {build.mesh}: build it for one device, and split its params over any mesh"
    elif build.exact:
        problem = "was built for an engine with rl_exact: build it without, and ask for exact=True"
    elif any(each.blocks is not None for each in config.attention):
        problem = "attends to blocks of keys by the means of their keys, which is written for pages alone"
    elif any(each.compressed is not None for each in config.attention):
        problem = "attends to keys of blocks of tokens, which is written for pages alone"
    elif config.quantization is not None:
        stored = getattr(config.quantization, "method", None) or config.quantization
        problem = f"stores its weights as {stored}, which have no gradient: take a checkpoint of plain weights"
    else:
        return
    raise ValueError(f"{config.architecture} cannot be run over whole sequences: the model {problem}")


def run_unpaged(
    model: CausalLM,
    token_ids: jax.Array,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    sections: dict[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return hidden states [B, T, D] after the final norm, and logits f32[B, T, V], of rows of tokens i32[B, T].

    model: one that passes `check_unpaged`, which is not called here. segment_ids: i32[B, T]; neighbours with equal ids
    are a segment, and a token sees its own segment alone. Negative ids are padding, which experts do not compute. None:
    a row is one segment. positions: i32[B, T]; None to count from the first token of each segment. sections: further
    sections of the batch (ForwardBatch.sections).
    """
    num_rows, length = token_ids.shape
    count = num_rows * length
    tokens = jnp.arange(count, dtype=jnp.int32)
    is_first = run_starts(segment_ids, num_rows, length)
    (starts,) = jnp.nonzero(is_first.ravel(), size=count, fill_value=count)
    cu_q_lens = jnp.append(starts, count).astype(jnp.int32)
    num_runs = jnp.sum(is_first, dtype=jnp.int32)
    own = tokens if segment_ids is None else jnp.where(segment_ids.ravel() < 0, -1, tokens)
    no_pages, none = jnp.zeros((count, 1), jnp.int32), jnp.int32(0)
    ragged = RaggedBatch(cu_q_lens, jnp.diff(cu_q_lens), no_pages, own, num_runs, none)
    nowhere = jnp.full((count,), num_rows, jnp.int32)
    rows = StateRows(cu_q_lens, jnp.full((count,), -1, jnp.int32), nowhere, nowhere, num_runs, none)
    places = run_indexes(cu_q_lens, count) if positions is None else positions.ravel()
    batch = ForwardBatch(token_ids.ravel(), places, tokens, (ragged,), {"states": rows, **(sections or {})})
    with rows_of(UNPAGED):
        hidden, _ = model(batch, _nothing_cached(model, num_rows, length))
        logits = model.logits(hidden)
    logits = logits[:, : model.config.vocab_size]
    return hidden.reshape(num_rows, length, -1), logits.reshape(num_rows, length, -1)


def _nothing_cached(model: CausalLM, num_rows: int, length: int) -> KVPages | Cache:
    """Return zeros in place of a pool, for `num_rows` rows of `length` tokens: KVPages, or, if layers keep states, a
    Cache with a zeroed row of each state for each row of tokens.
    """
    groups = model.cache_groups(length, model.build.dtype, hybrid=False)
    spec = pool_spec(groups, 1)
    shape = (num_rows * length, *pool_shape(spec, SEQUENCES)[1:])
    kv = KVPages(jnp.zeros(shape, model.build.dtype), None, None, spec, UNPAGED)
    states = state_rows(groups, num_rows)
    return Cache(kv, states) if states else kv
