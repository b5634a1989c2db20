"""Blocks that heads of DFlash and DSpark draft: what stands in each place, and which places predict the drafts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.runner.extensions.drafts.block_step import blocks_of

MASK = 99
# Two rows of two drafts, between them one without any, and padding.
CU_Q_LENS, POSITIONS = [0, 3, 4, 7], [10, 11, 12, 5, 20, 21, 22, 0]
SLOTS, KV_LENS, LAST = [100, 101, 102, 50, 200, 201, 202, -1], [13, 6, 23], [7, 8, 9]


def blocks(from_anchor: bool) -> dict[str, list[int]]:
    pages, none = jnp.zeros((3, 4), jnp.int32), jnp.zeros(8, jnp.int32)
    cu_q_lens, kv_lens, slots = (jnp.asarray(each, jnp.int32) for each in (CU_Q_LENS, KV_LENS, SLOTS))
    ragged = RaggedBatch(cu_q_lens, kv_lens, pages, slots, jnp.int32(3), jnp.int32(0))
    batch = ForwardBatch(none, jnp.asarray(POSITIONS, jnp.int32), cu_q_lens[1:] - 1, (ragged,))
    found, first = blocks_of(batch, jnp.asarray(LAST, jnp.int32), MASK, from_anchor=from_anchor)
    (own,) = found.ragged
    named = {"tokens": found.token_ids, "positions": found.positions, "first": first}
    named |= {"cu_q_lens": own.cu_q_lens, "kv_lens": own.kv_lens, "slots": own.slot_mapping}
    return {name: np.asarray(value).tolist() for name, value in named.items()}


def test_masks_behind_the_last_token_predict_the_drafts():
    assert blocks(False) == {
        "tokens": [7, MASK, MASK, 8, 9, MASK, MASK, MASK],
        "positions": POSITIONS,
        "first": [1, 4, 5],
        "cu_q_lens": CU_Q_LENS,
        "kv_lens": KV_LENS,
        "slots": SLOTS,
    }


def test_the_last_token_predicts_the_first_draft():
    found = blocks(True)
    assert found.pop("positions")[:4] == [10, 11, 20, 21]
    assert found == {
        "tokens": [7, MASK, 9, MASK, MASK, MASK, MASK, MASK],
        "first": [0, 2, 2],
        "cu_q_lens": [0, 2, 2, 4],
        "kv_lens": [12, 5, 22],
        "slots": [100, 101, 200, 201, -1, -1, -1, -1],
    }
