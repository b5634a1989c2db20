"""What the schedule for Hopper GPUs says of pairs that cuts fall into, counted again one item after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.attention.hopper.schedule import attention_schedule
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.tuning import HopperAttention, Tuning

SPEC = AttentionSpec(128, 1, 192, 128, 1.0, values_in_keys=True)


@pytest.mark.parametrize("num_ctas", [1, 5])
def test_parts_are_the_items_of_pairs_that_have_several(num_ctas):
    tuning = Tuning(hopper_attention=HopperAttention(num_ctas=num_ctas, pair_cost=1, min_part_cost=1))

    @jax.jit
    def schedule(batch):
        return attention_schedule(batch, SPEC, num_tokens=24, page_size=64, tuning=tuning).decode

    several = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        q_lens = rng.integers(0, 5, 6)
        kv_lens = q_lens + rng.integers(0, 640, 6) * (q_lens > 0)
        arrays = np.cumsum([0, *q_lens]), kv_lens, np.zeros((6, 11)), np.zeros(24), 6 - seed % 3, 0
        items = jax.tree.map(np.asarray, schedule(RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in arrays))))
        num_pairs, parts, bounds = len(items.pair_items) - 1, 0, {}
        for pair, (first, end) in enumerate(zip(items.pair_items, items.pair_items[1:], strict=False)):
            if end - first == 1:
                assert items.cuts.item_parts[first] == -1
            elif end > first:
                assert items.cuts.item_parts[first:end].tolist() == list(range(parts, parts + end - first))
                bounds[pair] = parts, parts + int(end - first)
                parts += int(end - first)
        found = zip(items.cuts.pairs.tolist(), items.cuts.bounds.tolist(), items.cuts.bounds[1:].tolist(), strict=False)
        found = [(pair, (first, end)) for pair, first, end in found]
        assert [each for each in found if each[0] < num_pairs] == list(bounds.items())
        assert all(first == end for pair, (first, end) in found if pair == num_pairs)
        assert parts <= 2 * num_ctas
        several += len(bounds)
    assert bool(several) == (num_ctas > 1)
