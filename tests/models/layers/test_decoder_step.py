"""The function that runs layers in a step: one trace for layers of a kind, none from one step to another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.layers.base.section import Section, key_limits_of
from jaxengine.models.layers.decoder_step import LAYER, layer_runner

SCALE, TRACES = 1.0, []


class OwnLayer(nnx.Module):
    """A layer of a user's own, which reads a global."""

    def __call__(self, x, kv, pages, step):
        TRACES.append(SCALE)
        return x * SCALE, kv


def test_layers_of_a_step_share_a_trace_and_steps_do_not(monkeypatch):
    def step(x):
        run = layer_runner()
        graph, state = nnx.split(OwnLayer())
        for _ in range(3):
            x, *_ = run(graph, state, x, None, None, None)
        return x

    traced = [jax.jit(lambda x: step(x)).trace(jnp.ones(2))]
    assert [eqn.params["name"] for eqn in traced[0].jaxpr.eqns] == [LAYER] * 3
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    traced.append(jax.jit(lambda x: step(x)).trace(jnp.ones(2)))
    assert TRACES == [1.0, 2.0]
    assert [each.lower().compile()(jnp.ones(2)).tolist() for each in traced] == [[1, 1], [8, 8]]


class Limited(Section):
    """A section whose tokens see `more` keys after their own."""

    def __init__(self, more):
        self.more = more

    def key_limits(self, config, positions):
        return positions + 1 + self.more


def test_a_token_sees_what_any_section_lets_it_see():
    at, first, second = jnp.arange(3), Limited(jnp.array([2, 1, 0])), Limited(jnp.array([0, 0, 4]))
    assert key_limits_of([Section()], None, at) is None
    assert key_limits_of([Section(), first], None, at).tolist() == [3, 3, 3]
    assert key_limits_of([first, Section(), second], None, at).tolist() == [3, 3, 7]
