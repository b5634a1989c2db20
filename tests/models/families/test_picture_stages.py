"""Stages of a pipeline know which tokens are of a picture, though only the first has the pictures' embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import pool_spec
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.pictures import Pictures
from jaxengine.models.registry import build_model
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import checkpoint
from tests.models.conftest import load_recorded

NAME, PAGE_SIZE, NUM_TOKENS = "gemma3_sees_vision", 8, 16


@pytest.mark.thorough("compiles a model four times")
def test_two_stages_see_as_one_model_does():
    config = load_recorded(NAME).config
    rng, tokens = np.random.default_rng(0), np.arange(NUM_TOKENS, dtype=np.int32)
    index = np.where((tokens >= 3) & (tokens < 11), tokens - 3, -1).astype(np.int32)
    rows = rng.standard_normal((8, config.hidden_size)).astype(np.float32)
    ragged = RaggedBatch(
        *(np.asarray(each, np.int32) for each in ([0, NUM_TOKENS], [NUM_TOKENS], [[0, 1]], tokens, 1, 0))
    )

    def run(stage: Stage, hidden, own_rows):
        model = build_model(config, Build("float32", stage=stage))
        source = SafetensorsCheckpoint(checkpoint(NAME))
        nnx.update(model, load_params(model, source))
        source.close()
        sections = {"pictures": Pictures(own_rows, index)}
        batch = ForwardBatch(tokens, tokens, tokens[-1:], (ragged,), sections)
        kv = alloc(pool_spec(model.cache_groups(PAGE_SIZE, "float32", hybrid=False), 2))
        graph, state = nnx.split(model)
        inputs = [] if hidden is None else [hidden]

        @jax.jit
        def forward(state, batch, kv, *inputs):
            return nnx.merge(graph, state)(batch, kv, *inputs)[0]

        return forward(state, jax.tree.map(jnp.asarray, batch), kv, *inputs)

    first, last = Stage(0, 1, is_last=False), Stage(1, 3, is_first=False)
    whole = run(Stage(0, 3), None, rows)
    np.testing.assert_allclose(run(last, run(first, None, rows), None), whole, rtol=0, atol=1e-4)
    # The first token of a picture sees its last one.
    rows[-1] += 1
    other = run(Stage(0, 3), None, rows)
    assert np.abs(other - whole)[3].max() > 1e-3 and np.abs(other - whole)[:3].max() == 0
