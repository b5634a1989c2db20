"""Operations on states for tokens with a row each: those of a sequence after one another give what a chunk gives."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.registry import EXACT, PLATFORM_ROWS, kernel, platform_rows, rows_of
from jaxengine.pallas_kernels.state.rows import StateRows
from tests.pallas_kernels.state.problems import BATCHES, NUM_ROWS, Batch

COUNT = 12  # of features
SHAPES = {  # of the arrays of each token, and of a state
    "causal_conv": (((COUNT,),), (3, COUNT)),
    "gated_delta_rule": (((2, 8), (2, 8), (4, 6), (4,), (4,)), (4, 8, 6)),
    "selective_scan": (((6,), (8,), (8,), (6,)), (6, 8)),
    "state_space": (((4, 6), (2, 8), (2, 8), (4,), (4,)), (4, 6, 8)),
}
# Of what all tokens share: a convolution's weights, and a scan's rates.
SHARED = {"causal_conv": (COUNT, 4), "selective_scan": (6, 8)}


def token_rows(rows: StateRows, counts: tuple[int, ...]) -> StateRows:
    """The same step with a row for each token, of which the last of a sequence has its second row to save to."""
    seq = np.repeat(np.arange(len(counts)), counts)
    first = np.concatenate([np.arange(count) for count in counts]) == 0
    last = np.concatenate([np.arange(count)[::-1] for count in counts]) == 0
    reads, writes, saves = (np.asarray(part) for part in (rows.reads, rows.writes, rows.saves))
    arrays = (
        np.arange(len(seq) + 1),
        np.where(first, reads[seq], writes[seq]),
        writes[seq],
        np.where(last, saves[seq], NUM_ROWS),
        len(seq),
        len(seq),
    )
    return StateRows(*(jnp.asarray(array, jnp.int32) for array in arrays))


@pytest.mark.parametrize("op", SHAPES)
def test_tokens_after_one_another_are_a_chunk(op):
    batch: Batch = BATCHES["decodes and prompts"]
    rng, num_tokens, (shapes, state_shape) = np.random.default_rng(0), sum(batch.counts), SHAPES[op]
    tokens = [jnp.asarray(rng.standard_normal((num_tokens, *shape)) / 4, jnp.float32) for shape in shapes]
    if op != "causal_conv":  # decay, and beta or dt
        tokens[3:] = [*(-jnp.abs(each) for each in tokens[3:-1]), jnp.abs(tokens[-1])]
    state = jnp.asarray(rng.standard_normal((NUM_ROWS, *state_shape)), jnp.float32)
    more: Any = [-jnp.abs(jnp.asarray(rng.standard_normal(SHARED[op]), jnp.float32))] if op in SHARED else []
    chunks = kernel(op, "cpu")
    rows = batch.rows()
    padded = [jnp.pad(each, ((0, batch.num_tokens - num_tokens), *((0, 0),) * (each.ndim - 1))) for each in tokens]
    expected, states = jax.jit(chunks)(*padded, *more, state, rows)
    own = token_rows(rows, batch.counts)
    found, after = jax.jit(kernel(op, EXACT))(*tokens, *more, state, own)
    np.testing.assert_allclose(found, expected[:num_tokens], rtol=0, atol=2e-5)
    np.testing.assert_allclose(after, states, rtol=0, atol=2e-5)
    # A sequence that comes in two steps has the same bits: the second half goes on from the first.
    half = num_tokens // 2
    first = replace(own, num_seqs=jnp.int32(half), num_decode=jnp.int32(half))
    rest = jax.tree.map(lambda part: jnp.roll(part, -half, axis=0), (tokens, own.reads, own.writes, own.saves))
    second = StateRows(own.cu_q_lens, *rest[1:], jnp.int32(num_tokens - half), jnp.int32(num_tokens - half))
    run = partial(jax.jit(kernel(op, EXACT)))
    one, between = run(*tokens, *more, state, first)
    two, end = run(*rest[0], *more, between, second)
    np.testing.assert_array_equal(one[:half], found[:half])
    np.testing.assert_array_equal(two[: num_tokens - half], found[half:])
    np.testing.assert_array_equal(end, after)


def test_tokens_without_a_row_of_their_own_are_refused():
    arrays = jnp.zeros((32, COUNT)), jnp.zeros((COUNT, 4)), jnp.zeros((NUM_ROWS, 3, COUNT))
    with pytest.raises(ValueError, match="every token must have a row of its own, got 2 for 32 tokens"):
        kernel("causal_conv", EXACT)(*arrays, BATCHES["one prompt"].rows())


def test_rows_are_chosen_within_the_context_alone():
    with rows_of(EXACT):
        assert platform_rows() == {"default": EXACT}
    assert platform_rows() == PLATFORM_ROWS
