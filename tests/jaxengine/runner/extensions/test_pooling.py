"""What steps keep of prompts that are pooled, against the whole prompt at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.config.pooler import CLS, LAST, MAX, MEAN, MEAN_SQRT_LEN, POOLING_TYPES, WEIGHTED_MEAN
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import RaggedBatch
from jaxengine.runner.extensions.pooling.pooling import pool_rows

SLOTS, SIZE, TOKENS, ROWS = 4, 6, 16, 3
EXPECTED = {
    LAST: lambda states: states[-1],
    CLS: lambda states: states[0],
    MEAN: lambda states: states.mean(axis=0),
    MAX: lambda states: states.max(axis=0),
    WEIGHTED_MEAN: lambda states: np.average(states, axis=0, weights=range(1, len(states) + 1)),
    MEAN_SQRT_LEN: lambda states: states.sum(axis=0) / len(states) ** 0.5,
}


def batch_of(counts: list[int], starts: list[int]) -> ForwardBatch:
    """Rows of so many tokens behind so many; nothing that pooling does not read."""
    counts = [*counts, *[0] * (ROWS - len(counts))]
    starts = [*starts, *[0] * (ROWS - len(starts))]
    cu_q_lens = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    kv_lens = jnp.asarray([count and start + count for count, start in zip(counts, starts, strict=True)], jnp.int32)
    nothing = jnp.zeros(1, jnp.int32)
    ragged = RaggedBatch(
        cu_q_lens=cu_q_lens,
        kv_lens=kv_lens,
        page_table=nothing,
        slot_mapping=nothing,
        num_seqs=nothing,
        num_decode=nothing,
    )
    return ForwardBatch(
        token_ids=nothing, positions=nothing, logits_indices=jnp.maximum(cu_q_lens[1:] - 1, 0), ragged=(ragged,)
    )


@pytest.mark.parametrize("pooling_type", POOLING_TYPES)
def test_chunks_of_two_prompts_with_a_slot_that_had_another_owner(pooling_type):
    """Steps of one shape; padding is not finite, and a slot begins with what its last owner left."""
    random = np.random.default_rng(0)
    prompts = {3: random.normal(size=(20, SIZE)), 1: random.normal(size=(9, SIZE))}
    kept = None if pooling_type == LAST else jnp.full((SLOTS, SIZE), np.nan, jnp.float32)
    done, found = dict.fromkeys(prompts, 0), {}
    run = jax.jit(pool_rows, static_argnums=0)
    for chunks in ([(3, 5)], [(3, 1), (1, 4)], [(1, 1), (3, 13)], [(3, 1), (1, 4)]):
        hidden = np.full((TOKENS, SIZE), np.nan, np.float32)
        parts = [prompts[slot][done[slot] : done[slot] + count] for slot, count in chunks]
        hidden[: sum(map(len, parts))] = np.concatenate(parts)
        starts = [done[slot] for slot, _ in chunks]
        slots = np.array([*(slot for slot, _ in chunks), *[SLOTS] * (ROWS - len(chunks))], np.int32)
        batch = batch_of([count for _, count in chunks], starts)
        kept, pooled = run(pooling_type, kept, hidden, batch, slots, np.array([*starts, 0, 0][:ROWS], np.int32))
        for row, (slot, count) in enumerate(chunks):
            done[slot] += count
            found[slot] = np.asarray(pooled[row])
            expected = EXPECTED[pooling_type](prompts[slot][: done[slot]])
            np.testing.assert_allclose(found[slot], expected, rtol=1e-5, atol=1e-6)
    assert done == {3: 20, 1: 9}
