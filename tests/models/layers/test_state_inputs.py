"""Inputs of states: the state after some of a step's tokens follows from what the layer recorded of all of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import Cache, StateRows, pool_spec, state_rows
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.decoder_step import DecoderStep
from jaxengine.models.layers.states.inputs import SECTION, StateInputs
from jaxengine.models.registry import build_model, read_folder
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from tests.fixtures.drawn_weights import FOLDER

PAGE_SIZE, NUM_SLOTS, WIDTH, COUNTS, ACCEPTED = 4, 5, 4, (4, 3, 2), (2, 3, 1)
# One for each kind of layer that keeps a state.
FAMILIES = (
    *("qwen3_next", "kimi_linear", "granite_hybrid", "jamba", "zamba", "lfm2", "minimax", "bailing_linear"),
    "recurrent_gemma",
)


def step_of(counts, writes, sections=()):
    """Rows of COUNTS tokens at most, that begin at position 7, as a batch of WIDTH tokens for each."""
    num_tokens, num_seqs = WIDTH * len(counts), len(counts)
    cu = jnp.cumsum(jnp.array([0, *counts], jnp.int32), dtype=jnp.int32)
    reads, nowhere = jnp.arange(1, num_seqs + 1, dtype=jnp.int32), jnp.full(num_seqs, NUM_SLOTS, jnp.int32)
    rows = StateRows(cu, reads, reads if writes else nowhere, nowhere, jnp.int32(num_seqs), jnp.int32(0), WIDTH)
    table, none = jnp.zeros((num_seqs, 32), jnp.int32), jnp.full(num_tokens, -1, jnp.int32)
    ragged = RaggedBatch(cu, 7 + jnp.diff(cu), table, none, jnp.int32(num_seqs), jnp.int32(0))
    where = np.concatenate([np.arange(7, 7 + count) for count in counts])
    positions = jnp.zeros(num_tokens, jnp.int32).at[: len(where)].set(where)
    return ForwardBatch(jnp.zeros_like(positions), positions, cu[1:] - 1, (ragged,), {"states": rows, **dict(sections)})


@pytest.mark.parametrize("name", FAMILIES)
def test_states_follow_from_recorded_inputs(name, recorded):
    model = recorded(name).model
    config, groups = model.config, model.cache_groups(PAGE_SIZE, "float32", hybrid=False)
    index = next(index for index, layer in enumerate(config.attention) if layer.state is not None)
    graph, state = nnx.split(model)
    rng, num_tokens = np.random.default_rng(0), WIDTH * len(COUNTS)
    states = jax.tree.map(
        lambda rows: jnp.asarray(rng.normal(0, 1, rows.shape), rows.dtype), state_rows(groups, NUM_SLOTS)
    )
    x = jnp.asarray(rng.normal(0, 1, (num_tokens, config.stream_size)), jnp.float32)

    @partial(jax.jit, static_argnums=(2, 3))
    def run(x, given, counts, writes):
        """The layer's result, the states after it, and the inputs that it has recorded if it gets none."""
        model, layers = nnx.merge(graph, state), [() if given is None else given, *[()] * (len(states) - 1)]
        section = StateInputs(layers)
        cache = Cache(alloc(pool_spec(groups, 1)), states)
        step = DecoderStep(config, model.build, groups, step_of(counts, writes, [(SECTION, section)]), cache)
        out = step.run(index, model.layers[index], x)
        return out, step.cache.states[0], section.layers[0]

    out, unchanged, inputs = run(x, None, COUNTS, False)
    jax.tree.map(np.testing.assert_array_equal, unchanged, states[0])
    declared = config.attention[index].state.token_inputs
    assert [(each.shape, each.dtype) for each in inputs] == [
        ((num_tokens, *each.shape), each.dtype or "float32") for each in declared
    ]
    firsts = np.cumsum([0, *COUNTS[:-1]])
    taken = np.concatenate([first + np.arange(count) for first, count in zip(firsts, ACCEPTED, strict=True)])
    rest = np.setdiff1d(np.arange(num_tokens), taken)[: num_tokens - len(taken)]
    order = np.concatenate([taken, rest])
    _, expected, _ = run(x[order], None, ACCEPTED, True)
    nothing = jnp.full_like(x, jnp.nan)
    _, found, _ = run(nothing, tuple(part[order] for part in inputs), ACCEPTED, True)
    for own, wanted, before in zip(found, expected, states[0], strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-5 * np.abs(wanted).max())
        written = np.arange(1, len(COUNTS) + 1)
        assert all(np.any(own[row] != before[row]) for row in written)
        np.testing.assert_array_equal(np.delete(own, written, 0), np.delete(before, written, 0))
    assert np.isfinite(out[: sum(COUNTS)]).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_inputs_have_the_declared_dtypes_where_activations_have_fewer_bits(name):
    """Those without a dtype of their own have that of activations, which cannot be told from float32 above."""
    config = read_folder(FOLDER / name)
    model = build_model(config, Build("bfloat16"))
    groups = model.cache_groups(PAGE_SIZE, "bfloat16", hybrid=False)
    index = next(index for index, layer in enumerate(config.attention) if layer.state is not None)
    graph, weights = nnx.split(model)

    def run(weights, states, x):
        model, section = nnx.merge(graph, weights), StateInputs([()] * len(states))
        cache = Cache(alloc(pool_spec(groups, 1)), states)
        step = DecoderStep(config, model.build, groups, step_of(COUNTS, False, [(SECTION, section)]), cache)
        step.run(index, model.layers[index], x)
        return section.layers[0]

    x = jax.ShapeDtypeStruct((WIDTH * len(COUNTS), config.stream_size), jnp.bfloat16)
    inputs = jax.eval_shape(run, weights, state_rows(groups, NUM_SLOTS), x)
    declared = [each.dtype or "bfloat16" for each in config.attention[index].state.token_inputs]
    assert [each.dtype for each in inputs] == declared
