"""Experts with adapters: rows get what merged weights give them, and rows without one what the layer alone gives."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.moe import ExpertLoad, MixtureOfExperts
from jaxengine.models.lora import PoolArray
from tests.models.layers.test_moe import ALL, CONFIG, tokens

SPEC = LoraSpec(3, 4)
EVERYTHING = replace(CONFIG, experts=ALL)
SLOTS = [2, -1, 0, 2, 1, -1, 0, 0, 1, 2, -1, 1]


def drawn(config, lora):
    """A layer whose weights and pools follow from their shapes and order."""
    layer = MixtureOfExperts(config, source="m", build=Build(jnp.float32, lora=lora, layer=0))
    rng, pools, state = np.random.default_rng(0), np.random.default_rng(1), []
    for path, variable in nnx.to_flat_state(nnx.state(layer)):
        value = variable.get_value()
        generator, width = (pools, 4.0) if isinstance(variable, PoolArray) else (rng, value.shape[-2:][0] ** 0.5 / 2)
        state.append((path, variable.replace(jnp.asarray(generator.standard_normal(value.shape) / width, jnp.float32))))
    nnx.update(layer, nnx.from_flat_state(state))
    return layer


def called(graph):
    def call(state, x, rows):
        layer = nnx.merge(graph, state)
        y = layer(x, rows)
        nnx.pop(layer, ExpertLoad)
        return y

    return jax.jit(call)


def rows_of(slots, in_use=True):
    return Rows(jnp.arange(len(slots)) != 7, Adapters(jnp.asarray(slots, jnp.int32), jnp.int32(in_use)))


def merged_with(layer, plain, slot):
    """The plain layer with what a slot's adapters add in its weights, by NumPy."""
    rank, change = SPEC.max_lora_rank, {}
    for name, pools in (("gate_up", layer.gate_up_lora), ("down", layer.down_lora)):
        a = np.asarray(pools.a[...], np.float64)[:, slot].reshape(8, -1, rank, pools.a.shape[-1])
        parts = [
            np.einsum("eri,ero->eio", a[:, module], np.asarray(b[...], np.float64)[:, slot])
            for module, b in zip(pools.module, pools.b, strict=True)
        ]
        change[(name, "values")] = np.concatenate(parts, axis=2)
    linears = {("router",): layer.router_lora}
    if layer.shared is not None:
        linears |= {("shared_gate",): layer.shared_gate_lora}
        linears |= {("shared", name, "weight"): getattr(layer.shared, name).lora for name in ("gate_up", "down")}
    for path, pools in linears.items():
        inputs = dict(nnx.to_flat_state(nnx.state(plain)))[(*path, "values")].get_value().shape[0]
        a = np.asarray(pools.a[...], np.float64).T
        a = a.reshape(inputs, pools.num_modules, SPEC.max_loras, rank)[:, :, slot]
        bs = [np.asarray(b[...], np.float64).reshape(SPEC.max_loras, rank, -1)[slot] for b in pools.b]
        change[(*path, "values")] = np.concatenate(
            [a[:, module] @ b for module, b in zip(pools.module, bs, strict=True)], axis=1
        )
    state = []
    for path, variable in nnx.to_flat_state(nnx.state(plain)):
        added = change.pop(path, 0.0)
        state.append((path, variable.replace(jnp.asarray(np.asarray(variable.get_value()) + added, jnp.float32))))
    assert not change
    return nnx.from_flat_state(state)


def test_rows_of_three_adapters_and_of_none():
    """With all that a layer of experts may have: a shared MLP and its gate, biases, a router with an adapter."""
    layer, plain = drawn(EVERYTHING, SPEC), drawn(EVERYTHING, None)
    graph, state = nnx.split(layer)
    call, x = called(graph), tokens(len(SLOTS))
    found, alone = (np.asarray(call(state, x, rows_of(SLOTS, in_use))) for in_use in (True, False))
    plain_graph, plain_state = nnx.split(plain)
    plain_call, no_adapters = called(plain_graph), rows_of(SLOTS)._replace(adapters=None)
    np.testing.assert_array_equal(alone, plain_call(plain_state, x, no_adapters))
    without = np.asarray(SLOTS) < 0
    np.testing.assert_array_equal(found[without], alone[without])
    for slot in range(3):
        own = np.asarray(SLOTS) == slot
        wanted = np.asarray(plain_call(merged_with(layer, plain, slot), x, no_adapters))
        np.testing.assert_allclose(found[own], wanted[own], rtol=1e-4, atol=1e-4)
        assert np.abs(wanted[own] - alone[own]).max() > 0.1


def test_without_room_for_adapters_nothing_asks_for_them():
    """And with room there is one conditional at each product."""
    texts = []
    for lora in (None, SPEC):
        graph, state = nnx.split(nnx.eval_shape(lambda lora=lora: drawn_shape(lora)))
        for rows in (rows_of(SLOTS)._replace(adapters=None), rows_of(SLOTS)):
            x = jax.ShapeDtypeStruct((len(SLOTS), CONFIG.hidden_size), jnp.float32)
            texts.append(called(graph).lower(state, x, rows).as_text())
    without, ignored, not_told, told = texts
    body = [text[text.index("{", text.index("@main")) :] for text in (without, ignored)]
    assert body[0].count("\n") == body[1].count("\n") and "lora" not in ignored
    cases = [text.count('"stablehlo.case"') + text.count('"stablehlo.if"') for text in (ignored, not_told, told)]
    # Experts' and the shared MLP's two products, the router and the gate; four of them are dense, with products of
    # their own for each platform.
    assert cases[0] <= cases[1] and cases[2] >= cases[0] + 6


def drawn_shape(lora):
    return MixtureOfExperts(EVERYTHING, source="m", build=Build(jnp.float32, lora=lora, layer=0))
