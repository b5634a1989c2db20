"""The gated delta rule against float64, token by token."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.registry import KERNELS, kernel
from jaxengine.pallas_kernels.state.delta import gated_delta_rule
from tests.pallas_kernels import reference
from tests.pallas_kernels.state.problems import BATCHES, NUM_ROWS, Batch

IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in KERNELS if op == "gated_delta_rule"}


def inputs(
    batch: Batch,
    *,
    heads: int = 4,
    k_heads: int = 2,
    key: int = 8,
    value: int = 12,
    alike: bool = False,
    by_element: bool = False,
):
    """One head forgets as good as everything at every third token.

    alike: all keys of a head are equal, nothing decays and everything is overwritten. by_element: each element of a key
    decays by itself, one of them not at all, another as good as completely."""
    rng, count = np.random.default_rng(1), batch.num_tokens
    q, k = rng.standard_normal((2, count, k_heads, key))
    if alike:
        k[:] = k[0]
    q, k = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    v, decay, beta = (rng.standard_normal((count, heads, *more)) for more in ((value,), (), ()))
    decay, beta = (0.0 * decay, np.ones_like(beta)) if alike else (-np.abs(decay), 1 / (1 + np.exp(-beta)))
    decay[::3, 2] = 0.0 if alike else -90.0
    if by_element:
        decay = decay[..., None] * np.abs(rng.standard_normal((count, heads, key)))
        decay[..., 1], decay[..., 2] = 0.0, -90.0
    state = rng.standard_normal((NUM_ROWS, heads, key, value))
    return [jnp.asarray(array, jnp.float32) for array in (q, k, v, decay, beta, state)]


def compare(implementation, batch: Batch, arrays, tolerance: float = 2e-5) -> None:
    rows, live = batch.rows(), len(batch.counts)
    reads, writes, ends = (np.asarray(array) for array in (rows.reads, rows.writes, rows.cu_q_lens))
    *tokens, state = arrays
    state = state.at[np.setdiff1d(np.arange(NUM_ROWS), reads[:live][reads[:live] >= 0])].set(jnp.nan)
    exact = reference.gated_delta_rule(*map(np.asarray, (*tokens, state)), ends, reads, writes, live)
    tokens = [array.at[ends[-1] :].set(jnp.nan) for array in tokens]
    o, after = jax.jit(implementation)(*tokens, state, rows)
    np.testing.assert_allclose(o, exact[0], rtol=0, atol=tolerance)
    saved = np.asarray(rows.saves)[live - 1]
    if saved < NUM_ROWS:
        exact[1][saved] = exact[1][writes[live - 1]]
    np.testing.assert_allclose(after, exact[1], rtol=0, atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_against_float64(implementation, batch):
    compare(implementation, batch, inputs(batch))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
def test_elements_that_decay_by_themselves(implementation):
    batch = BATCHES["decodes and prompts"]
    compare(implementation, batch, inputs(batch, by_element=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
def test_keys_that_are_all_alike(implementation):
    """Powers of the triangular system grow like binomial coefficients there."""
    batch = BATCHES["chunks of all sizes"]
    compare(implementation, batch, inputs(batch, alike=True), 1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
def test_a_sequence_does_not_depend_on_its_neighbours(implementation):
    """Bit for bit: other sequences, other places in the batch."""
    *tokens, state = inputs(many := BATCHES["decodes and prompts"])
    rows, ends = many.rows(), np.cumsum((0, *many.counts))
    run = jax.jit(implementation)
    o, after = run(*tokens, state, rows)
    for seq, count in enumerate(many.counts):
        alone = Batch((count,), int(seq < many.num_decode), many.num_tokens, many.num_seqs)
        place, kept = int(rows.writes[seq]), rows.saves.at[0].set(NUM_ROWS)
        own = replace(
            alone.rows(), reads=rows.reads.at[0].set(rows.reads[seq]), writes=rows.writes.at[0].set(place), saves=kept
        )
        moved = [jnp.roll(array, -int(ends[seq]), axis=0) for array in tokens]
        o_alone, after_alone = run(*moved, state, own)
        np.testing.assert_array_equal(o_alone[:count], o[ends[seq] : ends[seq + 1]])
        np.testing.assert_array_equal(after_alone[place], after[place])


@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (4, 1), (1, 40), (4, 40)])
def test_states_are_updated_in_place(seqs, tokens):
    batch = Batch((tokens,) * seqs, seqs * (tokens == 1), seqs * tokens, seqs)
    *arrays, state = inputs(batch)
    state = jnp.zeros((4096, *state.shape[1:]))
    rows = batch.rows()
    compiled = jax.jit(gated_delta_rule, donate_argnums=5).lower(*arrays, state, rows).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state.nbytes > memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": (8, 2, 9)}, "must agree"),
        ({"v": (8, 3, 12)}, "must agree"),
        ({"beta": (8, 2)}, "must agree"),
        ({"state": (9, 4, 12, 8)}, "must agree"),
        ({"state": "bfloat16"}, "must be float32"),
    ],
)
def test_shapes_that_do_not_fit(change, said):
    batch = BATCHES["decodes"]
    arrays = dict(zip(("q", "k", "v", "decay", "beta", "state"), inputs(batch), strict=True))
    for name, shape in change.items():
        arrays[name] = arrays[name].astype(shape) if isinstance(shape, str) else jnp.zeros(shape)
    with pytest.raises(ValueError, match=f"gated_delta_rule: .*{said}"):
        gated_delta_rule(*arrays.values(), batch.rows())
